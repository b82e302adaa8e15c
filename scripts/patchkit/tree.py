"""The patched tree: a git repository with commits for upstream, the overlay, and each patch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from byteps.patching.series import (
    JUNK,
    PatchError,
    Series,
    Upstream,
    hash_of,
    is_junk,
    listed,
    read_series,
    say,
    sha256_file,
    warn,
)

AUTHOR = ("Megatron-BytePS", "patches@megatron-byteps.invalid")
"""Author in every patch, regardless of who made the commit."""
FIXED_DATE = "2000-01-01T00:00:00+0000"
"""Date of all commits, so that equal content gives equal commits."""
EXCLUDED = "/build/\n/dist/\n/_skbuild/\n*.orig\n*.rej\n" + "\n".join(JUNK) + "\n"
"""Patterns of build products in a tree. They do not count as uncommitted work."""

# ---- git, which ignores settings of the user and the system


def try_git(
    folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`; do not raise if it fails."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    variables |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    variables |= {"GIT_TERMINAL_PROMPT": "0", "TZ": "UTC", "GIT_CONFIG_COUNT": "1"}
    # git accepts a tree that another user owns: in containers, root may have made it.
    variables |= {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    for who in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{who}_NAME": AUTHOR[0], f"GIT_{who}_EMAIL": AUTHOR[1]}
        variables[f"GIT_{who}_DATE"] = FIXED_DATE
    if not shutil.which("git"):
        raise PatchError("git is not installed (or not on PATH)")
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=variables | (env or {}), stdin=subprocess.DEVNULL,
        capture_output=True, check=False,
    )  # fmt: skip


def git(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run git in `folder` and return its output. Raises PatchError if git fails."""
    result = try_git(folder, *arguments, env=env)
    if result.returncode != 0:
        raise PatchError(f"git {' '.join(arguments)} failed in {folder}: {reason_of(result)}")
    return result.stdout.decode(errors="surrogateescape")


def reason_of(result: subprocess.CompletedProcess[bytes]) -> str:
    """Return git's lines about the error, without its advice on what to type next."""
    lines = (result.stderr + b"\n" + result.stdout).decode(errors="replace").splitlines()
    errors = [line.partition(": ")[2] for line in lines if line.startswith(("error: ", "fatal: "))]
    return "; ".join(errors) or " ".join(line.strip() for line in lines if line.strip())


def head_of(tree: Path, revision: str = "HEAD") -> str:
    return git(tree, "rev-parse", "--verify", f"{revision}^{{commit}}").strip()


def files_of(tree: Path, revision: str) -> set[str]:
    return set(git(tree, "ls-tree", "-r", "-z", "--name-only", revision).split("\0")) - {""}


# ---- upstreams, by hash, in the cache


def cache_root() -> Path:
    """Return the folder of the project's cache, outside the checkout. Its entries are named by
    their content."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MEGATRON_BYTEPS_CACHE") or Path(base, "megatron-byteps")).absolute()


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """Return a context with a temporary folder in `folder`. Complete results are moved from it to
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".patchset-") as temporary:
        yield Path(temporary)


def unpack(upstream: Upstream, destination: Path) -> None:
    """Write upstream's files to `destination`, which must not exist. Missing files are fetched."""
    if upstream.commit:
        repository = find_repository(upstream)
        destination.mkdir()
        with tempfile.TemporaryDirectory() as temporary:
            # A separate index and work tree leave those of the repository unchanged.
            env = {
                "GIT_DIR": git(repository, "rev-parse", "--absolute-git-dir").strip(),
                "GIT_WORK_TREE": str(destination.absolute()),
                "GIT_INDEX_FILE": str(Path(temporary, "index")),
            }
            git(destination, "read-tree", upstream.commit, env=env)
            git(destination, "checkout-index", "--all", "--quiet", env=env)
        return
    archive = fetch_sdist(upstream)
    with aside(destination.parent) as temporary:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        (top,) = temporary.iterdir()
        top.rename(destination)


def fetch_sdist(upstream: Upstream) -> Path:
    """Return the source archive of `upstream`. Raises PatchError if its hash is not the pinned
    one."""
    folder = cache_root() / "sdists" / upstream.sha256
    archive = next(folder.glob("*.tar.gz"), None)
    if archive:
        _verify(archive, upstream)
        return archive
    say(f"{upstream.label}: fetching the source distribution")
    with aside(folder.parent) as temporary:
        _pip_download(upstream, temporary)
        (archive,) = temporary.glob("*.tar.gz")
        _verify(archive, upstream)
        folder.mkdir(exist_ok=True)
        return archive.replace(folder / archive.name)


def _verify(archive: Path, upstream: Upstream) -> None:
    if (actual := sha256_file(archive)) != upstream.sha256:
        raise PatchError(
            f"wrong hash of {archive}: expected sha256 {upstream.sha256} (upstream.lock), actual "
            f"{actual}; delete the file if it is damaged"
        )


def _pip_download(upstream: Upstream, destination: Path) -> None:
    # pip also checks that this Python is new enough for the package: megatron-core requires 3.12.
    probe = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    candidates = [sys.executable, str(upstream.root / "build/venv/bin/python"), "python3"]
    for python in candidates:
        if shutil.which(python) and not subprocess.call([python, "-c", probe], stderr=-3):
            break
    else:
        raise PatchError("fetching needs a Python >= 3.11 with pip: run scripts/setup.sh")
    pin = f"{upstream.name}=={upstream.version}"
    requirements = destination / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{upstream.sha256}\n", encoding="utf-8")
    # Build dependencies may be wheels. Build isolation stays on, because BytePS's setup.py needs
    # it.
    result = subprocess.run(
        [python, "-m", "pip", "download", "--no-deps", "--no-binary", upstream.name,
         "--require-hashes", "--disable-pip-version-check", "--progress-bar", "off",
         "--dest", destination, "-r", requirements],
        stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        said = "\n  ".join(result.stdout.strip().splitlines()[-12:])
        raise PatchError(f"pip could not download {pin}:\n  {said}")


def find_repository(upstream: Upstream) -> Path:
    """Return a repository that has upstream's commit: the user's, or the cache's. Fetch the commit
    if necessary."""

    def has_commit(folder: Path) -> bool:
        command = ("cat-file", "-e", f"{upstream.commit}^{{tree}}")
        return folder.is_dir() and try_git(folder, *command).returncode == 0

    if named := os.environ.get(upstream.variable):
        if not Path(named).is_dir():
            raise PatchError(f"{upstream.variable}={named}: there is no such folder")
        if not has_commit(Path(named)):
            raise PatchError(
                f"{upstream.variable}={named} has no commit {upstream.commit}, for which the "
                f"series of {upstream.label} is made"
            )
        return Path(named)
    cached = cache_root() / "checkouts" / upstream.commit
    if has_commit(cached):
        return cached
    say(f"{upstream.label}: fetching commit {upstream.commit}")
    with aside(cached.parent) as temporary:
        git(temporary, "init", "-q", "--bare", "--template=", "repository")
        # git ends if it gets no data for half a minute.
        result = try_git(
            temporary / "repository", "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30",
            "fetch", "-q", "--depth=1", "--no-tags", upstream.repository, upstream.commit,
        )  # fmt: skip
        if result.returncode != 0:
            raise PatchError(
                f"{upstream.label}: cannot fetch commit {upstream.commit} from "
                f"{upstream.repository} ({reason_of(result)}): name a checkout that has it, "
                f"{upstream.variable}=/path/to/Megatron-LM"
            )
        shutil.rmtree(cached, ignore_errors=True)
        (temporary / "repository").rename(cached)
    return cached


# ---- trees


@dataclass
class State:
    """Results of the last apply, export or sync, stored in the tree's .git folder."""

    upstream_sha256: str = ""
    """Hash of upstream's source distribution, or its commit."""
    fingerprint: str = ""
    """Fingerprint of the inputs from which HEAD was made."""
    head: str = ""
    """Last commit that was exported. The patch folder has everything up to it."""
    synced: dict[str, str | None] = field(default_factory=dict)
    """Overlay files that were copied to the tree but not yet committed: hash by path; None if
    deleted."""
    shared: str = ""
    """Hash of the shared patches, which are another series', from which HEAD was made."""

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


def apply(upstream: Upstream, *, force: bool = False) -> None:
    """Make the tree as upstream.lock, overlay and patches define it.

    The new state is made in a temporary folder, and only files that differ are written to the tree.
    Raises PatchError, and leaves the tree unchanged, if a patch does not apply, an overlay file
    would overwrite an upstream file, or (unless `force`) work would be lost.
    """
    tree, wanted = upstream.tree, upstream.fingerprint()
    if (tree / ".git").is_dir():
        state, head = State.load(tree), head_of(tree)
        if state.fingerprint == wanted and not force:
            more = f"; commits in {upstream.shown(tree)} not exported" if head != state.head else ""
            say(f"{upstream.name}: up to date{more}")
            return
        if not force:
            refuse_to_lose_work(upstream)
        elif head not in (state.head, head_of(tree, "upstream")):
            git(tree, "update-ref", "refs/patchset/discarded", head)
            warn(f"{upstream.shown(tree)}: the old commits stay in refs/patchset/discarded")
        if state.upstream_sha256 != upstream.pin:
            shutil.rmtree(tree)
    elif tree.exists():
        raise PatchError(f"{upstream.shown(tree)} exists but is no git repository: move it away")
    if not tree.exists():
        make_base(upstream, tree)
    state, series, overlay = State.load(tree), read_series(upstream), upstream.overlay_files()
    git(tree, "worktree", "prune")
    with aside(tree.parent) as temporary:
        new = temporary / "tree"
        git(tree, "worktree", "add", "-q", "--detach", str(new), head_of(tree, "upstream"))
        try:
            commit_all(upstream, new, series)
            head = head_of(new)
        finally:
            git(tree, "worktree", "remove", "--force", str(new))
    git(tree, "tag", "-f", "overlay", f"{head}~{len(series.patches)}")
    # The index lacks files that were copied ahead, so the reset would write them again.
    if ahead := [path for path in state.synced if (tree / path).is_file()]:
        git(tree, "add", "-f", "--", *ahead)
    git(tree, "reset", "-q", "--hard", head)
    for path in set(state.synced) - set(overlay):
        (tree / path).unlink(missing_ok=True)
    shared = series.hash_of_shared()
    State(upstream_sha256=upstream.pin, fingerprint=wanted, head=head, shared=shared).save(tree)
    say(
        f"{upstream.name}: {upstream.shown(tree)} is {upstream.version} + {len(overlay)} overlay "
        f"files + {len(series.patches)} patches"
    )


def make_base(upstream: Upstream, tree: Path) -> None:
    """Make `tree`: a repository with a single commit (tag `upstream`), which has the files that
    upstream released."""
    kind = "commit" if upstream.commit else "sha256 of the source distribution"
    with aside(tree.parent) as temporary:
        new = temporary / tree.name
        unpack(upstream, new)
        git(new, "init", "-q", "--template=", "--initial-branch=main")
        # git's garbage collection would run in the background while a temporary worktree exists.
        for setting in ("core.autocrlf false", "core.fileMode true", "gc.auto 0"):
            git(new, "config", *setting.split())
        (new / ".git/info").mkdir(exist_ok=True)
        (new / ".git/info/exclude").write_text(EXCLUDED, encoding="utf-8")
        # git keeps all bytes unchanged, whatever upstream's .gitattributes says.
        (new / ".git/info/attributes").write_text("* -text -ident -filter\n", encoding="utf-8")
        git(new, "add", "-A", "-f")
        commit(new, f"{upstream.label}\n\n{kind}:\n{upstream.pin}")
        git(new, "tag", "upstream")
        new.rename(tree)
    State(upstream_sha256=upstream.pin, head=head_of(tree)).save(tree)


def commit(tree: Path, message: str) -> None:
    git(tree, "commit", "-q", "--no-verify", "--allow-empty", "-m", message)


def commit_all(upstream: Upstream, tree: Path, series: Series) -> None:
    """Commit overlay and patches. Context and whitespace must match exactly; there is no three-way
    merge."""
    files, taken = upstream.overlay_files(), files_of(tree, "HEAD")
    for relative, source in files.items():
        blocked = {relative, *map(str, Path(relative).parents)} & taken
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
    commit(tree, "Overlay of Megatron-BytePS")
    for patch in series.patches:
        result = try_git(
            tree, "am", "-q", "--no-3way", "--keep-cr", "--keep-non-patch", "--no-scissors",
            "--committer-date-is-author-date", "--whitespace=nowarn", str(patch),
            env={"GIT_COMMITTER_DATE": ""},
        )  # fmt: skip
        if result.returncode != 0:
            try_git(tree, "am", "--abort")
            raise PatchError(f"{upstream.shown(patch)} does not apply: {reason_of(result)}")


def refuse_to_lose_work(upstream: Upstream) -> None:
    """Raise PatchError, with advice, if the tree has work that exists nowhere else."""
    tree, shown = upstream.tree, upstream.shown(upstream.tree)
    if any((tree / ".git" / name).exists() for name in ("rebase-apply", "rebase-merge")):
        raise PatchError(f"a rebase or git am is unfinished in {shown}: finish or abort it")
    if dirty := uncommitted(upstream):
        raise PatchError(
            f"uncommitted changes in {shown} would be lost: {listed(dirty)}. Commit them there "
            "and run scripts/export_patches.sh (changes to overlay files belong in "
            f"{upstream.shown(upstream.overlay)}/), or throw them away with --force"
        )
    if has_commits_to_export(upstream):
        raise PatchError(
            f"commits in {shown} that were not exported would be lost: run "
            "scripts/export_patches.sh, or throw them away with --force"
        )


def has_commits_to_export(upstream: Upstream) -> bool:
    head = head_of(upstream.tree)
    return head != (State.load(upstream.tree).head or head)


def changed_paths(tree: Path) -> list[str]:
    """Return paths that differ from HEAD, except *.egg-info, which installations rewrite."""
    listing = git(tree, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all")
    paths = sorted(entry[3:] for entry in listing.split("\0") if entry)
    return [path for path in paths if ".egg-info/" not in path]


def uncommitted(upstream: Upstream) -> list[str]:
    """Return paths that differ from HEAD and are not copies of the overlay folder's files."""
    overlay = upstream.overlay_files()
    known = State.load(upstream.tree).synced
    work = []
    for path in changed_paths(upstream.tree):
        mirrored = {known.get(path, ""), hash_of(overlay[path]) if path in overlay else ""}
        if hash_of(upstream.tree / path) not in mirrored:
            work.append(path)
    return work


def demand_tree(upstream: Upstream) -> Path:
    if (upstream.tree / ".git").is_dir():
        return upstream.tree
    shown = upstream.shown(upstream.tree)
    raise PatchError(f"{shown} is not there: run scripts/apply_patches.sh")


def sync_overlay(upstream: Upstream) -> list[str]:
    """Copy changed overlay files to the tree without a commit. Return the changed paths."""
    tree, files = demand_tree(upstream), upstream.overlay_files()
    state, taken = State.load(tree), files_of(tree, "upstream")
    changed = []
    for relative, source in files.items():
        if relative in taken:
            raise PatchError(f"overlay file {upstream.shown(source)} would overwrite upstream's")
        copy, content = tree / relative, sha256_file(source)
        if hash_of(copy) != content or os.access(source, os.X_OK) != os.access(copy, os.X_OK):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
            state.synced[relative] = content
            changed.append(relative)
    for relative in sorted((files_of(tree, "overlay") - taken | set(state.synced)) - set(files)):
        if (tree / relative).exists() and not is_junk(Path(relative).name):
            (tree / relative).unlink()
            state.synced[relative] = None
            changed.append(relative)
    state.save(tree)
    return changed


def tree_key(tree: Path) -> str:
    """Return a hash of everything that a build of `tree` uses: HEAD, and the files that differ from
    it."""
    digest = hashlib.sha256(git(tree, "rev-parse", "HEAD^{tree}").encode())
    for path in changed_paths(tree):
        digest.update(f"\0{path}\0{hash_of(tree / path)}".encode(errors="surrogateescape"))
    return digest.hexdigest()
