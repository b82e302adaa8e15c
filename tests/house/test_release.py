"""Conditions of a release; checksums, source archive; an audit's report."""

from __future__ import annotations

import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import audit
from scripts.releasekit import contents
from scripts.releasekit.contents import ReleaseError, pins

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "1.2.3"
DAY = "2026-01-02"


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@test.invalid"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project that may be released."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pyproject.toml").write_text(f'[project]\nversion = "{VERSION}"\n')
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION} ({DAY}, with more)\n\nNew.\n")
    (root / ".gitignore").write_text("/build/\n")
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all", "--date", f"{DAY}T00:00:00Z")
    return root


def commit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))
    git(root, "commit", "--quiet", "--all", "--message", "changed")


def test_what_may_be_released(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "build").mkdir()
    (checkout / "build/made").touch()
    release = contents.check(checkout)
    assert release.version == VERSION
    assert release.name == f"megatron-byteps-{VERSION}"
    assert release.commit == git(checkout, "rev-parse", "HEAD").strip()
    assert release.epoch == int(git(checkout, "log", "-1", "--format=%ct"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12345")
    assert contents.check(checkout).epoch == 12345
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    with pytest.raises(ReleaseError, match="SOURCE_DATE_EPOCH is 'today'"):
        contents.check(checkout)


@pytest.mark.parametrize("file", ["CHANGELOG.md", "new.cc"])
def test_files_that_are_not_committed_are_named(checkout: Path, file: str) -> None:
    (checkout / file).write_text("other\n")
    with pytest.raises(ReleaseError, match=rf"not as committed: {re.escape(file)}\."):
        contents.check(checkout)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (VERSION, "1.2.2", "begins with 1.2.2, and pyproject.toml says 1.2.3"),
        (f"## {VERSION}", "##", "begins with no version"),
        (DAY, "unreleased", "'unreleased, with more': put the date there"),
    ],
)
def test_versions_that_disagree(checkout: Path, old: str, new: str, said: str) -> None:
    commit(checkout, "CHANGELOG.md", old, new)
    with pytest.raises(ReleaseError, match=said):
        contents.check(checkout)


def test_a_draft_may_be_unreleased(checkout: Path) -> None:
    commit(checkout, "CHANGELOG.md", DAY, "unreleased")
    assert contents.check(checkout, draft=True).version == VERSION


def test_the_version_of_this_checkout_is_in_its_changelog() -> None:
    contents.check_changelog(REPOSITORY, contents.version_of(REPOSITORY), draft=True)


def test_the_source_archive_is_what_is_committed(checkout: Path, tmp_path: Path) -> None:
    release = contents.check(checkout)
    (checkout / "left.over").touch()
    made = [contents.archive(checkout, release, tmp_path) for _ in range(2)]
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as archive:
        files = {member.name for member in archive if member.isfile()}
        assert {member.mtime for member in archive.getmembers()} == {release.epoch}
    listed = git(checkout, "ls-files").split()
    assert files == {f"{release.name}/{name}" for name in listed}


def test_pins_are_all_of_the_locks() -> None:
    pinned = pins()
    text = "".join(path.read_text() for path in (REPOSITORY / "locks").iterdir())
    heads = set(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE))
    assert set(pinned) == heads
    versions = [version for name, version in pinned if name == "transformers"]
    assert len(versions) == 2, "hf and rl have a version each"
    groups, hashes = pinned["transformers", versions[-1]]
    assert set(groups) <= {"frameworks", "hf"} and hashes


PROGRAM = """#!/bin/sh
case " $* " in *" --strict "*) ;; *) exit 2 ;; esac
for one in {refusing} {unknown}; do
  case " $* " in *" $one "*|*"/$one.lock "*) echo "no such host" >&2; exit 1 ;; esac
done
for one in {bad}; do
  case " $* " in *" X-1 "*) ;; *"/$one.lock "*) echo "torch 2 X-1 9"; exit 1 ;; esac
done
"""
Audit = Callable[..., int]


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """Runs an audit with a fake pip-audit."""

    def run(*arguments: str, **behaviour: str) -> int:
        program = tmp_path / "pip-audit"
        program.write_text(
            PROGRAM.format(**{"refusing": "", "unknown": "", "bad": "", **behaviour})
        )
        program.chmod(0o755)
        monkeypatch.setattr(audit, "ship_tools", lambda: tmp_path)
        return audit.main(arguments)

    return run


@pytest.mark.parametrize(
    ("behaviour", "arguments", "status", "said"),
    [
        ({}, [], 0, "compared (pypi), 0 with"),
        ({"refusing": "pypi"}, [], 0, "compared (osv), 0 with"),
        ({"bad": "base"}, [], audit.FOUND, "torch 2 X-1 9"),
        ({"bad": "base"}, ["--ignore-vuln", "X-1"], 0, "compared (pypi), 0 with"),
        ({"refusing": "pypi osv"}, [], audit.UNREACHABLE, "osv, base.lock: no such host"),
        ({"unknown": "ship"}, [], audit.UNREACHABLE, "pypi, ship.lock: no such host"),
        ({"bad": "base", "unknown": "ship"}, [], audit.FOUND, "not everything could be"),
        ({"bad": "torch-2-9"}, [], 0, "0 with"),
    ],
)
def test_an_audit(
    audited: Audit,
    capfd: pytest.CaptureFixture[str],
    behaviour: dict[str, str],
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    assert audited(*arguments, **behaviour) == status
    assert said in "".join(capfd.readouterr())
