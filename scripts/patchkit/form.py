"""Whether a patch looks as export writes it, for a series whose upstream is not at hand."""

from __future__ import annotations

import itertools
import re
from email.header import decode_header, make_header
from pathlib import Path

from .common import IDENTITY_EMAIL, IDENTITY_NAME, PatchError
from .hunks import Hunk, read_hunks
from .lock import Upstream, overlay_files, part_of

NAME = re.compile(r"\d{4}-[a-z][A-Za-z0-9_.-]*\.patch")
SUBJECT = re.compile(r"[a-z][A-Za-z0-9_./-]*: \S")
SUBJECT_LENGTH = 72
"""At most; git would cut the name of a longer one, perhaps within a word."""
CONTEXT = 3
"""Lines of upstream before and after a change."""
AUTHOR = f"From: {IDENTITY_NAME} <{IDENTITY_EMAIL}>\n".encode()
"""Of every patch, whatever the commit's author: a series has one."""

_HEADER = re.compile(
    rb"From 0{40} Mon Sep 17 00:00:00 2001\n"
    + re.escape(AUTHOR)
    + rb"Date: [^\n]+\nSubject: \[PATCH\] (?P<subject>[^\n]+(?:\n [^\n]+)*)\n(?:[^\n]+\n)*\n"
)
_INDEX = re.compile(rb"^index (?!(?:[0-9a-f]{40})\.\.(?:[0-9a-f]{40})(?: \d{6})?$)", re.M)


def check_form(upstream: Upstream, patch: Path) -> None:
    """Raises PatchError where a patch cannot be what export writes: its header, its name, a part
    or an overlay file, hunks that do not add up, or more of upstream than the lines around a
    change."""
    shown = upstream.shown(patch)
    content = patch.read_bytes()
    header = _HEADER.match(content)
    if not header:
        raise PatchError(f"{shown} does not begin as scripts/export_patches.sh writes it")
    folded = header["subject"].decode(errors="replace").replace("\n ", " ")
    subject = str(make_header(decode_header(folded)))
    if complaint := about_subject(subject):
        raise PatchError(f"{shown}: {complaint}")
    name = f"{patch.name[:4]}-{_as_name(subject)}.patch"
    if not NAME.fullmatch(patch.name) or patch.name != name:
        raise PatchError(f"{shown}: its subject asks for the name {name}")
    part_of(upstream, patch)
    if _INDEX.search(content, header.end()):
        raise PatchError(f"{shown}: a line 'index' lacks whole hashes")
    overlay = set(overlay_files(upstream))
    last: Hunk | None = None
    hunks = read_hunks(patch)
    if not hunks and b"\nGIT binary patch\n" not in content:
        raise PatchError(f"{shown} changes nothing")
    for hunk in hunks:
        where = f"{shown}: {hunk.path}, hunk {hunk.number}"
        if hunk.path in overlay:
            raise PatchError(f"{where}: that is an overlay file")
        if last and last.path == hunk.path and hunk.line < last.line + last.counts[0]:
            raise PatchError(f"{where} begins before the one above it ends")
        if complaint := _about_lines(hunk):
            raise PatchError(f"{where} {complaint}")
        last = hunk


def about_subject(subject: str) -> str | None:
    """What is wrong with the subject of a patch; None: nothing."""
    if not SUBJECT.match(subject):
        return 'the subject must read "area: what it does"'
    if len(subject) > SUBJECT_LENGTH:
        return f"the subject has {len(subject)} characters, at most {SUBJECT_LENGTH}"
    return None


def _about_lines(hunk: Hunk) -> str | None:
    """What is wrong with the lines of a hunk; None: nothing."""
    marks = [line[:1] for line in hunk.body]
    counted = (len(marks) - marks.count(b"+"), len(marks) - marks.count(b"-"))
    if counted != hunk.counts:
        return f"has {counted[0]} and {counted[1]} lines, and says {hunk.counts}"
    changes = [number for number, mark in enumerate(marks) if mark != b" "]
    if not changes:
        return "changes nothing"
    pairs = itertools.pairwise(changes)
    within = max((later - earlier - 1 for earlier, later in pairs), default=0)
    if changes[0] > CONTEXT or len(marks) - 1 - changes[-1] > CONTEXT or within > 2 * CONTEXT:
        return f"has more of upstream than {CONTEXT} lines around a change"
    return None


def _as_name(subject: str) -> str:
    """The subject as git writes it in the name of a file."""
    dashed = re.sub(r"[^A-Za-z0-9._]+", "-", subject)
    return re.sub(r"\.{2,}", ".", dashed).strip("-").rstrip(".-")
