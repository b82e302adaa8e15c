"""A project in miniature: two tiny upstreams, their cache, and the real scripts run on them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from scripts import patchset

REPOSITORY = Path(__file__).resolve().parents[2]

UPSTREAM_FILES = {
    "engine": {
        "setup.py": "from setuptools import setup\nsetup(name='engine', version='1.0')\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n",
        "src/queue.txt": "".join(f"line {number}\n" for number in range(1, 41)),
        "src/crlf.txt": "one\r\ntwo\r\nthree\r\n",
        "src/other.txt": "untouched\n",
        "tool.sh": "#!/bin/sh\n",
        ".gitattributes": "*.txt text=auto\n",
        ".gitignore": "src/other.txt\n",
        "engine.egg-info/SOURCES.txt": "setup.py\n",
    },
    "trainer": {
        "trainer/info.py": "MAJOR = 3\nMINOR = 1\nPATCH = 4\nPRE_RELEASE = ''\n",
        "trainer/loop.py": "#\n#\n#\n#\ndef step():\n    reduce()\n    update()\n",
    },
}

NEWEST_FILES = {
    "trainer/info.py": "MAJOR = 4\nMINOR = 0\nPATCH = 0\nPRE_RELEASE = ''\n",
    "trainer/loop.py": "import time\n#\n#\n#\n#\ndef step():\n    reduce()\n    update()\n",
    "trainer/second.py": "def second():\n    reduce()\n",
}
"""Files of the trainer's next version: the same step at other lines, and a second step."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Exit status and output of a script."""

    status: int
    output: str


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with an upstream.lock, and a cache that holds its source distributions."""

    root: Path
    cache: Path

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> Result:
        """Runs scripts/patchset.py on this project."""
        return run_script("--root", str(self.root), *arguments, cache=self.cache, env=env)

    def ok(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.status == 0, result.output
        return result.output

    def fails(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        result = self.run(*arguments, env=env)
        assert result.status == 1, result.output
        assert result.output.count("error: ") == 1, result.output
        return result.output

    def tree(self, name: str = "engine") -> Path:
        return self.root / "build" / name

    def git(self, *arguments: str, name: str = "engine") -> str:
        return git(self.tree(name), *arguments)

    def patch_folder(self, name: str = "engine") -> Path:
        return self.root / "patches" / name

    def commit(self, path: str, old: str, new: str, subject: str, name: str = "engine") -> None:
        """Replaces text in a file of the tree and commits that."""
        file = self.tree(name) / path
        content = file.read_bytes()
        assert old.encode() in content
        file.write_bytes(content.replace(old.encode(), new.encode(), 1))
        self.git("commit", "-q", "-a", "-m", f"{subject}\n\nBecause.", name=name)

    def write_overlay(self, path: str, text: str, name: str = "engine") -> Path:
        file = self.root / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def add_newest(self, folder: Path) -> Path:
        """Adds `newest`, the trainer's next version, which is a commit in a git repository and
        shares the trainer's patches; returns that repository."""
        checkout = folder / "newest"
        for path, text in NEWEST_FILES.items():
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            (checkout / path).write_text(text, encoding="utf-8")
        git(checkout, "init", "-q")
        git(checkout, "add", ".")
        git(checkout, "commit", "-q", "-m", "newest")
        commit = git(checkout, "rev-parse", "HEAD").strip()
        with (self.root / "upstream.lock").open("a", encoding="utf-8") as lock:
            lock.write(
                f'[[upstream]]\nname = "newest"\nversion = "4.0"\ncommit = "{commit}"\n'
                f'repository = "{checkout}"\nvariable = "NEWEST"\ntree = "build/newest"\n'
                'overlay = "trainer"\npatches = "patches/newest"\ntried = ["4.0.0"]\n'
                'version_file = "trainer/info.py"\n'
            )
        (self.patch_folder("newest")).mkdir(parents=True)
        (self.patch_folder("newest") / "series").write_text("../trainer/series\n")
        return checkout

    def patched(self) -> None:
        """Gives each upstream an overlay file and patches, exported and applied."""
        self.write_overlay("src/added.txt", "added\n")
        self.write_overlay("trainer/extra/hook.py", "HOOK = 1\n", "trainer")
        self.ok("apply")
        self.commit("src/queue.txt", "line 7\n", "line seven\n", "queue: spell seven")
        self.commit("src/queue.txt", "line 9\n", "line nine\n", "queue: spell nine")
        self.commit("trainer/loop.py", "    reduce()", "    hook()", "loop: hook", "trainer")
        self.ok("export")
        self.ok("apply")


def run_script(
    *arguments: str, cache: Path | None = None, env: dict[str, str] | None = None
) -> Result:
    """Runs scripts/patchset.py in this process, and gets both output streams as one text."""
    variables = dict(os.environ) | (env or {})
    if cache is not None:
        variables["MEGATRON_BYTEPS_CACHE"] = str(cache)
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            status = patchset.main(list(arguments))
        except SystemExit as error:  # bad use
            status = int(error.code or 0)
    return Result(status=status, output=output.getvalue())


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.invalid"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run(
        ["git", *identity, *arguments],
        cwd=folder,
        env=variables | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    ).stdout


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Returns content, mode and modification time (ns) of every file under `folder`, except
    .git."""
    return {
        path.relative_to(folder).as_posix(): (
            path.read_bytes(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Returns content and mode of every file, and every folder, under `folder`, except .git."""
    entries = {name: entry[:2] for name, entry in snapshot(folder).items()}
    folders = (path for path in folder.rglob("*") if path.is_dir())
    relative = (path.relative_to(folder) for path in folders)
    return entries | {f"{path}/": (b"", 0) for path in relative if ".git" not in path.parts}


def make_sdist(folder: Path, name: str) -> Path:
    """Writes a source distribution of UPSTREAM_FILES[name], the same bytes every time."""
    archive = folder / f"{name}-1.0.tar.gz"
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path, text in UPSTREAM_FILES[name].items():
            info = tarfile.TarInfo(f"{name}-1.0/{path}")
            info.size = len(text.encode())
            info.mode = 0o755 if path.endswith(".sh") else 0o644
            info.mtime = 1_000_000_000
            tar.addfile(info, io.BytesIO(text.encode()))
    archive.write_bytes(gzip.compress(plain.getvalue(), mtime=0))
    return archive


def make_project(folder: Path) -> Project:
    root, cache = folder / "project", folder / "cache"
    root.mkdir(parents=True)
    lock = ""
    for name in UPSTREAM_FILES:
        archive = make_sdist(folder, name)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        (cache / "sdists" / digest).mkdir(parents=True)
        shutil.move(archive, cache / "sdists" / digest / archive.name)
        lock += (
            f'[[upstream]]\nname = "{name}"\nversion = "1.0"\nsha256 = "{digest}"\n'
            f'tree = "build/{name}"\noverlay = "{name}"\npatches = "patches/{name}"\n'
        )
    lock += 'tried = ["3.1.3", "3.1.4"]\nversion_file = "trainer/info.py"\n'
    (root / "upstream.lock").write_text(lock, encoding="utf-8")
    return Project(root=root, cache=cache)
