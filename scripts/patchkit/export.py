"""Commits back to patches, and the proof that patches and commits say the same."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from .common import IDENTITY_EMAIL, IDENTITY_NAME, PatchError, git, say, warn
from .lock import Upstream, fingerprint, overlay_files, read_series
from .tree import (
    State,
    apply_patch,
    commit_overlay,
    head_of,
    make_base,
    uncommitted,
)

FORMAT = (
    "--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--no-renames",
    "--no-cover-letter", "--no-attach", "--no-thread", "--no-color", "--no-ext-diff",
    "--diff-algorithm=myers", "--unified=3", "--stat=72", "--src-prefix=a/", "--dst-prefix=b/",
    "--encode-email-headers", "--binary", "--filename-max-length=100",
)  # fmt: skip
NAME = re.compile(r"\d{4}-[a-z][A-Za-z0-9_.-]*\.patch")
SUBJECT = re.compile(r"[a-z][A-Za-z0-9_./-]*: \S")
SUBJECT_LENGTH = 72
"""At most; git would cut the name of a longer one, perhaps within a word."""
FROM = re.compile(rb"^From: .*\n(?:[ \t].*\n)*", re.M)
AUTHOR = f"From: {IDENTITY_NAME} <{IDENTITY_EMAIL}>\n".encode()
"""Of every patch, whatever the commit's author: a series has one."""


def format_patches(upstream: Upstream, tree: Path, base: str, destination: Path) -> list[Path]:
    """Writes the commits `base`..HEAD of `tree` to `destination`; returns the files in order.

    Each names the project as its author.

    Raises PatchError when a commit cannot be a patch of the series, naming it.
    """
    overlay = set(overlay_files(upstream))
    commits = git(tree, "rev-list", "--reverse", f"{base}..HEAD").split()
    for commit in commits:
        subject = git(tree, "log", "-1", "--format=%s", commit).strip()
        label = f"commit {commit[:10]} ({subject})"
        if len(git(tree, "rev-list", "--parents", "-1", commit).split()) != 2:
            raise PatchError(f"{label} is a merge: a series is linear")
        if not SUBJECT.match(subject):
            raise PatchError(f'{label}: the subject must read "area: what it does"')
        if len(subject) > SUBJECT_LENGTH:
            raise PatchError(
                f"{label}: the subject has {len(subject)} characters, at most {SUBJECT_LENGTH}"
            )
        listing = git(tree, "diff-tree", "-r", "-z", "--name-only", "--no-commit-id", commit)
        for path in listing.split("\0"):
            if path in overlay:
                raise PatchError(
                    f"{label} touches {path}, an overlay file: make that change in "
                    f"{upstream.shown(upstream.overlay / path)} and take it out of the commit"
                )
    if not commits:
        return []
    output = git(tree, "format-patch", *FORMAT, "-o", str(destination), f"{base}..HEAD")
    files = [Path(line) for line in output.splitlines()]
    for file in files:
        if not NAME.fullmatch(file.name):
            raise PatchError(f"{file.name}: the subject gives no name of the form NNNN-area-what")
        file.write_bytes(FROM.sub(AUTHOR, file.read_bytes(), count=1))
    return files


def series_text(files: list[Path]) -> str:
    return "".join(f"{file.name}\n" for file in files)


def export(upstream: Upstream) -> list[str]:
    """Rewrites the patch folder from the tree's commits; returns the names of changed files."""
    tree, folder = upstream.tree, upstream.patches
    if not (tree / ".git").is_dir():
        raise PatchError(f"{upstream.shown(tree)} is not there: run scripts/apply_patches.sh")
    state = State.load(tree)
    dirty = uncommitted(upstream, state)
    if dirty:
        warn(f"{upstream.shown(tree)}: not exported, because not committed: {', '.join(dirty)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    was_current = _overlay_is_current(upstream, tree)
    changed = []
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as temporary:
        files = format_patches(upstream, tree, "overlay", Path(temporary))
        wanted = {file.name: file.read_bytes() for file in files}
    wanted["series"] = series_text(files).encode()
    folder.mkdir(exist_ok=True)
    for old in sorted(folder.glob("*.patch")):
        if old.name not in wanted:
            old.unlink()
            changed.append(f"{old.name} (removed)")
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
            changed.append(name)
    state.head = head_of(tree)
    # The tree agrees with its inputs now, unless the overlay has moved on since it was committed.
    state.fingerprint = fingerprint(upstream) if was_current else ""
    state.save(tree)
    return changed


def _overlay_is_current(upstream: Upstream, tree: Path) -> bool:
    files = overlay_files(upstream)
    upstreams = set(git(tree, "ls-tree", "-r", "-z", "--name-only", "upstream").split("\0"))
    committed = set(git(tree, "ls-tree", "-r", "-z", "--name-only", "overlay").split("\0"))
    if committed - upstreams != set(files):
        return False
    hashes = git(tree, "ls-tree", "-r", "-z", "overlay").split("\0")
    blobs = {line.split("\t", 1)[1]: line.split()[2] for line in hashes if line}
    if not files:
        return True
    paths = [str(path) for path in files.values()]
    actual = git(tree, "hash-object", "--no-filters", "--", *paths).split()
    return all(blobs[name] == value for name, value in zip(files, actual, strict=True))


def check(upstream: Upstream) -> None:
    """Proves in a temporary folder that the series applies exactly and survives a round trip.

    Raises PatchError naming the first file that fails.
    """
    patches = read_series(upstream)
    with tempfile.TemporaryDirectory(prefix="patchset-check-") as temporary:
        aside = replace(upstream, tree=Path(temporary, upstream.tree.name))
        make_base(aside, aside.tree)
        commit_overlay(aside, aside.tree)
        base = head_of(aside.tree)
        for patch in patches:
            apply_patch(aside, aside.tree, patch)
        output = Path(temporary, "export")
        output.mkdir()
        files = format_patches(aside, aside.tree, base, output)
        for patch, file in zip(patches, files, strict=True):
            if patch.name != file.name:
                raise PatchError(f"{upstream.shown(patch)} would be exported as {file.name}")
            _compare(upstream, patch, patch.read_bytes(), file.read_bytes())
        series = upstream.patches / "series"
        if patches:
            _compare(upstream, series, series.read_bytes(), series_text(files).encode())
    say(f"{upstream.name}: {len(patches)} patches apply exactly and export unchanged")


def _compare(upstream: Upstream, path: Path, old: bytes, new: bytes) -> None:
    if old == new:
        return
    before, after = old.splitlines(), new.splitlines()
    pairs = zip(before, after, strict=False)
    line = next(
        (number for number, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after))
    )
    raise PatchError(
        f"{upstream.shown(path)} is not what export writes (line {line + 1}): patches are made by "
        "scripts/export_patches.sh, not edited; run apply_patches.sh, then export_patches.sh"
    )
