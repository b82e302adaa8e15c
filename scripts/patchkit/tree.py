"""The assembled tree: a git repository with one commit for upstream, one for the overlay and one
per patch. A new state is made aside and moved in as a whole, touching only files that differ, so
that a failure leaves the tree as it was and incremental builds stay incremental.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .lock import (
    PatchError,
    Series,
    Upstream,
    fingerprint,
    git,
    is_junk,
    overlay_files,
    read_series,
    reason_of,
    say,
    sha256_file,
    try_git,
    unpack,
    warn,
)

# Build products that belong to nobody; without this they would count as uncommitted work.
EXCLUDES = "\n".join(
    ("__pycache__/", "*.pyc", "*.so", "*.o", "*.egg-info/", "/build/", "/dist/", "/_skbuild/",
     ".pytest_cache/", ".ruff_cache/", ".cache/", "*.swp", "*~", "*.orig", "*.rej", "")
)  # fmt: skip


@dataclass
class State:
    """What the last apply, export or sync left; stored inside the tree's .git folder."""

    upstream_sha256: str = ""
    """Of upstream's source distribution, or its commit."""
    fingerprint: str = ""
    """Of the inputs that HEAD was made from (or, after an export, agrees with)."""
    head: str = ""
    """The commit up to which everything also stands in the patch folder."""
    synced: dict[str, str] = field(default_factory=dict)
    """Overlay files copied in ahead of their commit: sha256 by path; "" when deleted."""
    shared: str = ""
    """Hash of the patches that HEAD was made from and that another series holds."""

    @staticmethod
    def load(tree: Path) -> State:
        try:
            return State(**json.loads((tree / ".git/patchset.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return State()

    def save(self, tree: Path) -> None:
        temporary = tree / ".git/patchset.json.new"
        temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        temporary.replace(tree / ".git/patchset.json")


def head_of(tree: Path, revision: str = "HEAD") -> str:
    return git(tree, "rev-parse", "--verify", f"{revision}^{{commit}}").strip()


def apply(upstream: Upstream, *, force: bool = False) -> bool:
    """Brings the tree to what lock, overlay and patches say; True when anything changed.

    Raises PatchError, leaving the tree untouched, when a patch does not apply, when an overlay
    file would overwrite one of upstream's, or when work would be lost (unless `force`).
    """
    tree, wanted = upstream.tree, fingerprint(upstream)
    if (tree / ".git").is_dir():
        state = State.load(tree)
        head = head_of(tree)
        if state.fingerprint == wanted and not force:
            if head != state.head:
                say(f"{upstream.name}: up to date; commits in {upstream.shown(tree)} not exported")
            else:
                say(f"{upstream.name}: up to date")
            return False
        if not force:
            refuse_to_lose_work(upstream, state, head)
        elif head not in (state.head, head_of(tree, "upstream")):
            git(tree, "update-ref", "refs/patchset/discarded", head)
            warn(f"{upstream.shown(tree)}: the old commits stay in refs/patchset/discarded")
        if state.upstream_sha256 != upstream.pin:
            shutil.rmtree(tree)
    elif tree.exists():
        raise PatchError(f"{upstream.shown(tree)} exists but is no git repository: move it away")
    if not tree.exists():
        make_base(upstream, tree)
    state = State.load(tree)
    commit = _make_commits(upstream, tree)
    # Files copied in ahead are already what the new commit holds: telling the index keeps the
    # reset from writing them again, which would change their modification times.
    ahead = [path for path in state.synced if (tree / path).is_file()]
    if ahead:
        git(tree, "add", "-f", "--", *ahead)
    git(tree, "reset", "-q", "--hard", commit)
    overlay = overlay_files(upstream)
    for path in set(state.synced) - set(overlay):
        # Copied in ahead, never committed, and out of the overlay again: no commit removes it.
        (tree / path).unlink(missing_ok=True)
    series = read_series(upstream)
    State(
        upstream_sha256=upstream.pin, fingerprint=wanted, head=commit, shared=hash_of_shared(series)
    ).save(tree)
    count = len(series.patches)
    say(
        f"{upstream.name}: {upstream.shown(tree)} is {upstream.version} + {len(overlay)} overlay "
        f"file{'s' * (len(overlay) != 1)} + {count} patch{'es' * (count != 1)}"
    )
    return True


def make_base(upstream: Upstream, tree: Path) -> None:
    """Makes `tree`, a repository whose one commit (tag `upstream`) is what upstream released."""
    kind = "commit" if upstream.commit else "sha256 of the source distribution"
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=f".{tree.name}-") as temporary:
        new = Path(temporary, tree.name)
        unpack(upstream, new)
        git(new, "init", "-q", "--template=")
        git(new, "symbolic-ref", "HEAD", "refs/heads/main")
        for key, value in (
            ("core.autocrlf", "false"),
            ("core.fileMode", "true"),
            # No collection in the background while a temporary worktree is alive.
            ("gc.auto", "0"),
        ):
            git(new, "config", key, value)
        (new / ".git/info").mkdir(exist_ok=True)
        (new / ".git/info/exclude").write_text(EXCLUDES, encoding="utf-8")
        # Bytes in, bytes out, whatever an upstream .gitattributes says.
        (new / ".git/info/attributes").write_text("* -text -ident -filter\n", encoding="utf-8")
        git(new, "add", "-A", "-f")
        git(
            new, "commit", "-q", "--no-verify", "-m",
            f"{upstream.label}\n\n{kind}:\n{upstream.pin}",
        )  # fmt: skip
        git(new, "tag", "upstream")
        new.rename(tree)
    State(upstream_sha256=upstream.pin, head=head_of(tree)).save(tree)


@contextmanager
def _worktree(tree: Path, commit: str) -> Iterator[Path]:
    """A temporary second working tree of `tree`'s repository, detached at `commit`."""
    git(tree, "worktree", "prune")
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=f".{tree.name}-") as temporary:
        aside = Path(temporary, "tree")
        git(tree, "worktree", "add", "-q", "--detach", str(aside), commit)
        try:
            yield aside
        finally:
            git(tree, "worktree", "remove", "--force", str(aside))


def _make_commits(upstream: Upstream, tree: Path) -> str:
    """Overlay and patch commits on top of tag `upstream`; returns the last one."""
    with _worktree(tree, head_of(tree, "upstream")) as aside:
        commit_overlay(upstream, aside)
        overlay = head_of(aside)
        for patch in read_series(upstream).patches:
            apply_patch(upstream, aside, patch)
        head = head_of(aside)
    git(tree, "tag", "-f", "overlay", overlay)
    return head


def hash_of_shared(series: Series) -> str:
    """Of the patches that another series holds; empty where there are none."""
    if not series.shared:
        return ""
    return hashlib.sha256(b"".join(path.read_bytes() for path in series.shared)).hexdigest()


def commit_overlay(upstream: Upstream, tree: Path) -> None:
    """Copies the overlay into `tree` and commits it, also when it is empty."""
    files = overlay_files(upstream)
    taken = set(git(tree, "ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0"))
    for relative, source in files.items():
        blocked = {relative, *(parent.as_posix() for parent in Path(relative).parents)} & taken
        if blocked or (tree / relative).is_dir():
            raise PatchError(
                f"overlay file {upstream.shown(source)} would overwrite "
                f"{min(blocked, default=relative)} of {upstream.name}: an overlay only adds "
                "files; edit upstream's with a patch"
            )
        (tree / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tree / relative)
    if files:
        git(tree, "add", "-f", "--", *files)
    git(tree, "commit", "-q", "--no-verify", "--allow-empty", "-m", "Overlay of Megatron-BytePS")


def apply_patch(upstream: Upstream, tree: Path, patch: Path) -> None:
    """Commits one patch with git am: exact context and whitespace, no three-way merge."""
    author_dates = {"GIT_COMMITTER_DATE": ""}
    result = try_git(
        tree, "am", "-q", "--no-3way", "--keep-cr", "--keep-non-patch", "--no-scissors",
        "--committer-date-is-author-date", "--whitespace=nowarn", str(patch), env=author_dates,
    )  # fmt: skip
    if result.returncode != 0:
        try_git(tree, "am", "--abort")
        raise PatchError(f"{upstream.shown(patch)} does not apply: {reason_of(result)}")


def refuse_to_lose_work(upstream: Upstream, state: State, head: str) -> None:
    """Raises PatchError, saying what to do, when the tree holds work that is nowhere else."""
    tree, shown = upstream.tree, upstream.shown(upstream.tree)
    for name in ("rebase-apply", "rebase-merge"):
        if (tree / ".git" / name).exists():
            raise PatchError(f"a rebase or git am is unfinished in {shown}: finish or abort it")
    dirty = uncommitted(upstream, state)
    if dirty:
        listed = ", ".join(dirty[:5]) + (f" and {len(dirty) - 5} more" if len(dirty) > 5 else "")
        raise PatchError(
            f"uncommitted changes in {shown} would be lost: {listed}. Commit them there and run "
            "scripts/export_patches.sh (changes to overlay files belong in "
            f"{upstream.shown(upstream.overlay)}/), or throw them away with --force"
        )
    if state.head and head != state.head:
        raise PatchError(
            f"commits in {shown} that were not exported would be lost: run "
            "scripts/export_patches.sh, or throw them away with --force"
        )


def has_commits_to_export(upstream: Upstream) -> bool:
    """Whether the tree has commits that its series lacks."""
    return head_of(upstream.tree) != State.load(upstream.tree).head


def uncommitted(upstream: Upstream, state: State) -> list[str]:
    """Paths changed in the tree since its HEAD that do not merely mirror the overlay folder."""
    tree = upstream.tree
    listing = git(tree, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all")
    overlay = overlay_files(upstream)
    changed = []
    for entry in listing.split("\0"):
        path = entry[3:]
        if not path or _is_made_by_install(path):
            continue
        file = tree / path
        content = sha256_file(file) if file.is_file() and not file.is_symlink() else ""
        if path in state.synced and state.synced[path] == content:
            continue
        if path in overlay and content == sha256_file(overlay[path]):
            continue
        changed.append(path)
    return changed


def _is_made_by_install(path: str) -> bool:
    """Source distributions hold their *.egg-info, which an installation of the tree rewrites."""
    return any(part.endswith(".egg-info") for part in Path(path).parts)


def sync_overlay(upstream: Upstream) -> list[str]:
    """Copies overlay files that differ into the tree, uncommitted; returns the changed paths.

    Commits, patches and files that are equal already stay untouched.
    """
    tree = upstream.tree
    if not (tree / ".git").is_dir():
        raise PatchError(f"{upstream.shown(tree)} is not there: run scripts/apply_patches.sh")
    state = State.load(tree)
    files = overlay_files(upstream)
    listing = git(tree, "ls-tree", "-r", "-z", "--name-only", "upstream")
    taken = set(listing.split("\0"))
    committed = set(git(tree, "ls-tree", "-r", "-z", "--name-only", "overlay").split("\0")) - taken
    changed = []
    for relative, source in files.items():
        if relative in taken:
            raise PatchError(f"overlay file {upstream.shown(source)} would overwrite upstream's")
        target = tree / relative
        same_mode = os.access(source, os.X_OK) == os.access(target, os.X_OK)
        content = sha256_file(source)
        if target.is_file() and same_mode and sha256_file(target) == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        state.synced[relative] = content
        changed.append(relative)
    for relative in sorted((committed | set(state.synced)) - set(files) - {""}):
        if (tree / relative).exists() and not is_junk(Path(relative).name):
            (tree / relative).unlink()
            state.synced[relative] = ""
            changed.append(relative)
    state.save(tree)
    return changed


def tree_key(tree: Path) -> str:
    """A hash of the content a build of `tree` sees: its HEAD and what differs from it."""
    listing = git(tree, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all")
    digest = hashlib.sha256(git(tree, "rev-parse", "HEAD^{tree}").encode())
    paths = (entry[3:] for entry in listing.split("\0") if entry)
    for path in sorted(path for path in paths if not _is_made_by_install(path)):
        content = sha256_file(tree / path) if (tree / path).is_file() else ""
        digest.update(f"\0{path}\0{content}".encode(errors="surrogateescape"))
    return digest.hexdigest()
