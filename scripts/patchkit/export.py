"""Commits back to patches, and the proof that patches and commits say the same.

Where upstream is not at hand: that patches look as export writes them.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from email.header import decode_header, make_header
from pathlib import Path

from .lock import (
    IDENTITY_EMAIL,
    IDENTITY_NAME,
    PatchError,
    Series,
    Upstream,
    fingerprint,
    git,
    overlay_files,
    part_of,
    paths_of,
    read_series,
    say,
    warn,
)
from .tree import (
    State,
    apply_patch,
    commit_overlay,
    hash_of_shared,
    head_of,
    make_base,
    uncommitted,
)

NAME = re.compile(r"\d{4}-[a-z][A-Za-z0-9_.-]*\.patch")
SUBJECT = re.compile(r"[a-z][A-Za-z0-9_./-]*: \S")
SUBJECT_LENGTH = 72
"""At most; git would cut the name of a longer one, perhaps within a word."""
AUTHOR = f"From: {IDENTITY_NAME} <{IDENTITY_EMAIL}>\n".encode()
"""Of every patch, whatever the commit's author: a series has one."""

_HEADER = re.compile(
    rb"From 0{40} Mon Sep 17 00:00:00 2001\n"
    + re.escape(AUTHOR)
    + rb"Date: [^\n]+\nSubject: \[PATCH\] (?P<subject>[^\n]+(?:\n [^\n]+)*)\n(?:[^\n]+\n)*\n"
)


def check_form(upstream: Upstream, patch: Path) -> None:
    """Raises PatchError where a patch cannot be what export writes: its header, its name, its part,
    hunks in which git finds other numbers of lines than they say, an overlay file."""
    shown = upstream.shown(patch)
    header = _HEADER.match(patch.read_bytes())
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
    for path in paths_of(upstream, patch):
        if path in overlay_files(upstream):
            raise PatchError(f"{shown}: {path} is an overlay file")


def about_subject(subject: str) -> str | None:
    """What is wrong with the subject of a patch; None: nothing."""
    if not SUBJECT.match(subject):
        return 'the subject must read "area: what it does"'
    if len(subject) > SUBJECT_LENGTH:
        return f"the subject has {len(subject)} characters, at most {SUBJECT_LENGTH}"
    return None


def _as_name(subject: str) -> str:
    """The subject as git writes it in the name of a file."""
    dashed = re.sub(r"[^A-Za-z0-9._]+", "-", subject)
    return re.sub(r"\.{2,}", ".", dashed).strip("-").rstrip(".-")


FORMAT = (
    "--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--no-renames",
    "--no-cover-letter", "--no-attach", "--no-thread", "--no-color", "--no-ext-diff",
    "--diff-algorithm=myers", "--unified=3", "--stat=72", "--src-prefix=a/", "--dst-prefix=b/",
    "--encode-email-headers", "--binary", "--filename-max-length=100",
)  # fmt: skip
FROM = re.compile(rb"^From: .*\n(?:[ \t].*\n)*", re.M)
OWN = 101
"""Number of the first patch that follows shared ones: another shared one renames none of them."""
_POSITION = re.compile(
    rb"^(?:index [0-9a-f]{40}\.\.[0-9a-f]{40}|@@ -\d+((?:,\d+)?) \+\d+((?:,\d+)?) @@.*)", re.M
)


def format_patches(
    upstream: Upstream, tree: Path, base: str, destination: Path, series: Series
) -> list[Path]:
    """Writes the commits `base`..HEAD of `tree` to `destination`; returns the files in order.

    Each names the project as its author. The first of them are the patches that `series` shares.

    Raises PatchError when a commit cannot be a patch of the series, naming it.
    """
    overlay = set(overlay_files(upstream))
    commits = git(tree, "rev-list", "--reverse", f"{base}..HEAD").split()
    for commit in commits:
        subject = git(tree, "log", "-1", "--format=%s", commit).strip()
        label = f"commit {commit[:10]} ({subject})"
        if len(git(tree, "rev-list", "--parents", "-1", commit).split()) != 2:
            raise PatchError(f"{label} is a merge: a series is linear")
        if complaint := about_subject(subject):
            raise PatchError(f"{label}: {complaint}")
        listing = git(tree, "diff-tree", "-r", "-z", "--name-only", "--no-commit-id", commit)
        for path in listing.split("\0"):
            if path in overlay:
                raise PatchError(
                    f"{label} touches {path}, an overlay file: make that change in "
                    f"{upstream.shown(upstream.overlay / path)} and take it out of the commit"
                )
    files = []
    if commits:
        output = git(tree, "format-patch", *FORMAT, "-o", str(destination), f"{base}..HEAD")
        files = [Path(line) for line in output.splitlines()]
    for file in files:
        if not NAME.fullmatch(file.name):
            raise PatchError(f"{file.name}: the subject gives no name of the form NNNN-area-what")
        file.write_bytes(FROM.sub(AUTHOR, file.read_bytes(), count=1))
    shared = [patch.name for patch in series.shared]
    if [file.name for file in files[: len(shared)]] != shared:
        raise PatchError(
            f"the first {len(shared)} commits of {upstream.shown(tree)} must be the patches of "
            f"{series.include}, in that order: change those in the tree that they belong to"
        )
    if not shared:
        return files
    own = files[len(shared) :]
    return files[: len(shared)] + [
        file.rename(file.with_name(f"{number:04}{file.name[4:]}"))
        for number, file in enumerate(own, start=OWN)
    ]


def series_text(series: Series, files: list[Path]) -> str:
    first = f"{series.include}\n" if series.include else ""
    return first + "".join(f"{file.name}\n" for file in files[len(series.shared) :])


def says_the_same(one: Path, other: Path) -> bool:
    """Whether two patches differ in nothing but where in a file they apply."""
    pair = (_POSITION.sub(rb"@@\1\2", path.read_bytes()) for path in (one, other))
    return next(pair) == next(pair)


def is_behind(upstream: Upstream) -> bool:
    """Whether the patches that the series shares have changed since the tree was made."""
    return State.load(upstream.tree).shared != hash_of_shared(read_series(upstream))


def export(upstream: Upstream) -> list[str]:
    """Rewrites the patch folder from the tree's commits; returns the names of changed files.

    A commit that says the same as the patch that another series holds is not written here.
    """
    tree, folder = upstream.tree, upstream.patches
    if not (tree / ".git").is_dir():
        raise PatchError(f"{upstream.shown(tree)} is not there: run scripts/apply_patches.sh")
    state, series = State.load(tree), read_series(upstream)
    if is_behind(upstream):
        raise PatchError(
            f"the patches of {series.include} have changed since {upstream.shown(tree)} was made: "
            f"run scripts/apply_patches.sh --only {upstream.name} first. It keeps commits that are "
            "not exported only with --force, in refs/patchset/discarded"
        )
    dirty = uncommitted(upstream, state)
    if dirty:
        warn(f"{upstream.shown(tree)}: not exported, because not committed: {', '.join(dirty)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    was_current = _overlay_is_current(upstream, tree)
    changed = []
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as temporary:
        files = format_patches(upstream, tree, "overlay", Path(temporary), series)
        shared = {path.name: path for path in series.shared}
        wanted = {
            file.name: file.read_bytes()
            for file in files
            if file.name not in shared or not says_the_same(file, shared[file.name])
        }
    wanted["series"] = series_text(series, files).encode()
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
    series = read_series(upstream)
    patches = series.patches
    if series.include:
        check_shape(upstream)
    with tempfile.TemporaryDirectory(prefix="patchset-check-") as temporary:
        aside = replace(upstream, tree=Path(temporary, upstream.tree.name))
        make_base(aside, aside.tree)
        commit_overlay(aside, aside.tree)
        base = head_of(aside.tree)
        for patch in patches:
            apply_patch(aside, aside.tree, patch)
        output = Path(temporary, "export")
        output.mkdir()
        files = format_patches(aside, aside.tree, base, output, series)
        for patch, file in zip(patches, files, strict=True):
            if patch.name != file.name:
                raise PatchError(f"{upstream.shown(patch)} would be exported as {file.name}")
            # Lines of shared patches, and of those after them, move with what they apply to.
            if not series.include or not says_the_same(patch, file):
                _compare(upstream, patch, patch.read_bytes(), file.read_bytes())
        listing = upstream.patches / "series"
        if patches:
            text = series_text(series, files).encode()
            _compare(upstream, listing, listing.read_bytes(), text)
    say(f"{upstream.name}: {len(patches)} patches apply exactly and export unchanged")


def check_shape(upstream: Upstream) -> int:
    """Checks what needs no upstream: names, headers, hunks, and that no patch stands twice.

    Raises PatchError naming the first file that fails; returns the number of patches.
    """
    series = read_series(upstream)
    for patch in series.shared:
        instead = series.instead.get(patch.name)
        if instead and says_the_same(patch, instead):
            raise PatchError(
                f"{upstream.shown(instead)} says the same as {upstream.shown(patch)}: remove it"
            )
    for number, patch in enumerate(series.own, start=OWN if series.include else 1):
        if not patch.name.startswith(f"{number:04}-"):
            raise PatchError(f"{upstream.shown(patch)}: its number in the series is {number:04}")
    for patch in [*series.own, *series.instead.values()]:
        check_form(upstream, patch)
    return len(series.patches)


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
