"""Exports the commits of a tree as patches, and checks that patches and commits are the same."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from email.header import decode_header, make_header
from pathlib import Path

from byteps.patching.hunks import read_patch
from byteps.patching.series import (
    PatchError,
    Series,
    Upstream,
    listed,
    part_of,
    read_series,
    say,
    warn,
)

from scripts.patchkit.tree import (
    AUTHOR,
    State,
    aside,
    commit_all,
    demand_tree,
    git,
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
OWN = 101
"""Number of the first patch after the shared ones. It is fixed, so a new shared patch renames no
other patch."""
_FROM = f"From: {AUTHOR[0]} <{AUTHOR[1]}>\n".encode()
_HEADER = re.compile(
    rb"From 0{40} Mon Sep 17 00:00:00 2001\n"
    + re.escape(_FROM)
    + rb"Date: [^\n]+\nSubject: \[PATCH\] ([^\n]+(?:\n [^\n]+)*)\n(?:[^\n]+\n)*\n"
)
_POSITION = re.compile(
    rb"^(?:index [0-9a-f]{40}\.\.[0-9a-f]{40}|@@ -\d+((?:,\d+)?) \+\d+((?:,\d+)?) @@.*)", re.M
)


def about_subject(subject: str) -> str | None:
    """Return the fault of a patch's subject, or None if it has none."""
    if not re.match(r"[a-z][A-Za-z0-9_./-]*: \S", subject):
        return 'the subject must read "area: what it does"'
    # If the subject is longer, git cuts the patch's file name, perhaps within a word.
    if len(subject) > 72:
        return f"the subject has {len(subject)} characters, at most 72"
    return None


def format_patches(upstream: Upstream, tree: Path, destination: Path, series: Series) -> list[Path]:
    """Write the commits that follow the overlay's commit to `destination`. Return the files in
    order.

    The first files are the shared patches of `series`. Raises PatchError, with the name of the
    commit, if a commit cannot be a patch of the series.
    """
    overlay = upstream.overlay_files()
    for commit in git(tree, "rev-list", "--reverse", "overlay..HEAD").split():
        parents, subject = git(tree, "log", "-1", "--format=%P%n%s", commit).splitlines()
        label = f"commit {commit[:10]} ({subject})"
        if " " in parents:
            raise PatchError(f"{label} is a merge: a series is linear")
        if complaint := about_subject(subject):
            raise PatchError(f"{label}: {complaint}")
        touched = git(tree, "diff-tree", "-r", "-z", "--name-only", "--no-commit-id", commit)
        if edited := set(touched.split("\0")) & set(overlay):
            path = min(edited)
            raise PatchError(
                f"{label} touches {path}, an overlay file: make that change in "
                f"{upstream.shown(upstream.overlay / path)} and take it out of the commit"
            )
    written = git(tree, "format-patch", *FORMAT, "-o", str(destination), "overlay..HEAD")
    files = [Path(line) for line in written.splitlines()]
    for file in files:
        text = re.sub(rb"(?m)^From: .*\n(?:[ \t].*\n)*", _FROM, file.read_bytes(), count=1)
        file.write_bytes(text)
    count = len(series.shared)
    if [file.name for file in files[:count]] != [patch.name for patch in series.shared]:
        raise PatchError(
            f"the first {count} commits of {upstream.shown(tree)} must be the patches of "
            f"{series.include}, in that order: change those in the tree that they belong to"
        )
    if not count:
        return files
    own = enumerate(files[count:], start=OWN)
    renamed = [file.rename(file.with_name(f"{number:04}{file.name[4:]}")) for number, file in own]
    return files[:count] + renamed


def says_the_same(first: Path, other: Path) -> bool:
    """Return whether two patches differ only in line numbers and hashes."""
    return len({_POSITION.sub(rb"@@\1\2", path.read_bytes()) for path in (first, other)}) == 1


def is_behind(upstream: Upstream) -> bool:
    """Return whether the shared patches of the series have changed since the tree was made."""
    return State.load(upstream.tree).shared != read_series(upstream).hash_of_shared()


def export(upstream: Upstream) -> list[str]:
    """Rewrite the patch folder from the tree's commits. Return the names of changed files.

    A commit is not written if it equals a shared patch, because another series has that patch.
    """
    tree, folder, series = demand_tree(upstream), upstream.patches, read_series(upstream)
    if is_behind(upstream):
        raise PatchError(
            f"the patches of {series.include} have changed since {upstream.shown(tree)} was made: "
            f"run scripts/apply_patches.sh --only {upstream.name} first. It keeps commits that are "
            "not exported only with --force, in refs/patchset/discarded"
        )
    if dirty := uncommitted(upstream):
        warn(f"{upstream.shown(tree)}: not exported, because not committed: {listed(dirty)}")
    with aside(folder.parent) as temporary:
        files = format_patches(upstream, tree, temporary, series)
        shared = {path.name: path for path in series.shared}
        wanted = {
            file.name: file.read_bytes()
            for file in files
            if file.name not in shared or not says_the_same(file, shared[file.name])
        }
    wanted["series"] = series.text([file.name for file in files[len(shared) :]])
    folder.mkdir(exist_ok=True)
    removed = [path for path in sorted(folder.glob("*.patch")) if path.name not in wanted]
    for path in removed:
        path.unlink()
    now = {path.name: path.read_bytes() for path in folder.iterdir()}
    changed = [name for name, content in wanted.items() if now.get(name) != content]
    for name in changed:
        (folder / name).write_bytes(wanted[name])
    if removed or changed:
        # The next apply makes the commits again, from the patches, as in every other tree.
        state = State.load(tree)
        state.head, state.fingerprint = head_of(tree), ""
        state.save(tree)
    return [f"{path.name} (removed)" for path in removed] + changed


def check(upstream: Upstream) -> None:
    """Check in a temporary folder that the series applies exactly, and that exporting it changes
    nothing."""
    check_form(upstream)
    series = read_series(upstream)
    with tempfile.TemporaryDirectory(prefix="patchset-check-") as temporary:
        copy = replace(upstream, tree=Path(temporary, upstream.tree.name))
        make_base(copy, copy.tree)
        commit_all(copy, copy.tree, series)
        git(copy.tree, "tag", "overlay", f"HEAD~{len(series.patches)}")
        files = format_patches(copy, copy.tree, Path(temporary, "export"), series)
        for patch, file in zip(series.patches, files, strict=True):
            # In shared patches and in patches after them, line numbers depend on the upstream.
            if not series.include or not says_the_same(patch, file):
                _compare(upstream, patch, file.read_bytes())
        if files:
            own = [file.name for file in files[len(series.shared) :]]
            _compare(upstream, upstream.patches / "series", series.text(own))
    say(f"{upstream.name}: {len(files)} patches apply exactly and export unchanged")


def _compare(upstream: Upstream, path: Path, new: bytes) -> None:
    before, after = path.read_bytes().splitlines(), new.splitlines()
    pairs = enumerate(zip(before, after, strict=False), start=1)
    if before != after:
        line = next((number for number, (a, b) in pairs if a != b), min(len(before), len(after)))
        raise PatchError(
            f"{upstream.shown(path)} is not what export writes (line {line}): patches are made by "
            "scripts/export_patches.sh, not edited; run apply_patches.sh, then export_patches.sh"
        )


def check_form(upstream: Upstream) -> int:
    """Check names, headers and hunks, and that no patch occurs twice. This needs no upstream.

    Raises PatchError with the name of the first file that fails. Returns the number of patches.
    """
    series, overlay = read_series(upstream), upstream.overlay_files()
    numbered = dict(enumerate(series.own, start=OWN if series.include else 1))
    for number, shared in enumerate(series.shared, start=1):
        if instead := series.instead.get(shared.name):
            if says_the_same(shared, instead):
                raise PatchError(
                    f"{upstream.shown(instead)} says the same as {upstream.shown(shared)}: remove "
                    "it"
                )
            numbered[number] = instead
    for number, patch in numbered.items():
        shown, header = upstream.shown(patch), _HEADER.match(patch.read_bytes())
        if not header:
            raise PatchError(f"{shown} is not what export writes: its header differs")
        folded = header[1].decode(errors="replace").replace("\n ", " ")
        subject = str(make_header(decode_header(folded)))
        if complaint := about_subject(subject):
            raise PatchError(f"{shown}: {complaint}")
        dashed = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._]+", "-", subject))
        name = f"{number:04}-{dashed.strip('-').rstrip('.-')}.patch"
        if patch.name != name:
            raise PatchError(f"{shown} would be exported as {name}")
        part_of(upstream, patch)
        if edited := set(read_patch(patch)) & set(overlay):
            raise PatchError(f"{shown}: {min(edited)} is an overlay file")
    return len(series.patches)
