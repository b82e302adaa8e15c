"""What may be released; checksums, source archive, packages of images; what an audit says."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import audit
from scripts.releasekit import contents
from scripts.releasekit.contents import ReleaseError, pins

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "1.2+megatron.7"
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
    versions = {"byteps": VERSION}
    versions |= {f"integrations/{name}": "0.7.0" for name in contents.INTEGRATIONS}
    for folder, version in versions.items():
        (root / folder).mkdir(parents=True)
        (root / folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
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
    ("file", "old", "new", "said"),
    [
        ("CHANGELOG.md", VERSION, "1.2+megatron.6", "begins with 1.2.megatron.6, and"),
        ("CHANGELOG.md", f"## {VERSION}", "##", "begins with no version"),
        ("CHANGELOG.md", DAY, "unreleased", "'unreleased, with more': put the date there"),
        ("byteps/pyproject.toml", VERSION, "1.2", "has version 1.2, not UPSTREAM"),
        ("integrations/rl/pyproject.toml", "0.7.0", "0.6.0", "0.6.0, but .* makes it 0.7.0"),
    ],
)
def test_versions_that_disagree(checkout: Path, file: str, old: str, new: str, said: str) -> None:
    commit(checkout, file, old, new)
    if file.startswith("byteps"):  # else the changelog is complained of
        commit(checkout, "CHANGELOG.md", VERSION, "1.2")
    with pytest.raises(ReleaseError, match=said):
        contents.check(checkout)


def test_a_draft_may_be_unreleased(checkout: Path) -> None:
    commit(checkout, "CHANGELOG.md", DAY, "unreleased")
    assert contents.check(checkout, draft=True).version == VERSION


def test_versions_of_this_checkout_agree() -> None:
    text = (REPOSITORY / "byteps/pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', text, re.MULTILINE)
    wanted = contents.integrations_version(version)
    for name in contents.INTEGRATIONS:
        assert (
            f'version = "{wanted}"'
            in (REPOSITORY / f"integrations/{name}/pyproject.toml").read_text()
        )
    assert contents.integrations_version("1.2+megatron.5.3") == "0.5.3"


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


def packed(files: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]  # "w", "w:gz"
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def stanza(name: str, version: str, status: str = "install ok installed") -> str:
    return (
        f"Package: {name}\nStatus: {status}\nArchitecture: amd64\nVersion: {version}\n about it\n"
    )


def test_packages_of_an_image(tmp_path: Path) -> None:
    """Those of the last layer that has any, in the order of the manifest."""
    old, new = stanza("libc6", "1"), "\n".join([stanza("libc6", "2:2"), stanza("ssl", "3")])
    gone = stanza("gone", "1", "deinstall ok config-files")
    about = b'PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n'
    layers = {
        "new": packed({"var/lib/dpkg/status": f"{new}\n{gone}".encode()}),
        "old": packed({"./var/lib/dpkg/status": old.encode(), "./usr/lib/os-release": about}),
        "config.json": b"{}",
        "manifest.json": json.dumps([{"Layers": ["old", "new"]}]).encode(),
    }
    path = tmp_path / "saved.image.tar.gz"
    path.write_bytes(packed(layers, "w:gz"))
    found = [(one.name, one.version, one.architecture, one.distribution)
             for one in contents.packages(path)]  # fmt: skip
    assert found == [("libc6", "2:2", "amd64", "debian-12"), ("ssl", "3", "amd64", "debian-12")]
    del layers["old"], layers["new"]
    path.write_bytes(packed(layers, "w:gz"))
    with pytest.raises(ReleaseError, match="has no var/lib/dpkg/status"):
        contents.packages(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ReleaseError, match="is no saved image"):
        contents.packages(path)


def test_pins_are_all_of_the_locks() -> None:
    found = pins()
    text = "".join(path.read_text() for path in (REPOSITORY / "locks").iterdir())
    heads = set(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE))
    assert set(found) == heads
    versions = [version for name, version in found if name == "transformers"]
    assert len(versions) == 2, "hf and rl have a version each"
    groups, hashes = found["transformers", versions[-1]]
    assert set(groups) <= {"frameworks", "hf"} and hashes
    for packages in audit.passes(found):
        assert len({name for name, _ in packages}) == len(packages)
    assert sorted(pin for packages in audit.passes(found) for pin in packages) == sorted(found)


PROGRAM = """#!{python}
import json, pathlib, sys
arguments = sys.argv[1:]
service = arguments[arguments.index("--vulnerability-service") + 1]
if service in {refusing!r}:
    print("ConnectionError: no such host", file=sys.stderr)
    sys.exit(1)
asked = pathlib.Path(arguments[arguments.index("--requirement") + 1]).read_text().split()
found = []
for name, version in (line.split("==") for line in asked):
    if name in {missing!r} or {missing!r} == ["all"]:
        found.append({{"name": name, "skip_reason": "not found"}})
        continue
    bad = name in {bad!r} and "X-1" not in arguments
    vulnerability = {{"id": "X-1", "aliases": ["CVE-1"], "fix_versions": ["9"]}}
    found.append({{"name": name, "version": version, "vulns": [vulnerability] if bad else []}})
print(json.dumps({{"dependencies": found, "fixes": []}}))
sys.exit(any(one.get("vulns") for one in found))
"""
Audit = Callable[..., int]


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """Runs an audit by a stand-in for pip-audit."""

    def run(*arguments: str, **behaviour: list[str]) -> int:
        values = {"refusing": [], "missing": [], "bad": [], **behaviour}
        program = tmp_path / "pip-audit"
        program.write_text(PROGRAM.format(python=sys.executable, **values))
        program.chmod(0o755)
        monkeypatch.setattr(audit, "ship_tools", lambda: tmp_path)
        return audit.main(arguments)

    return run


def test_an_audit_without_findings(audited: Audit, capfd: pytest.CaptureFixture[str]) -> None:
    assert audited() == 0
    count = len(audit.audited())
    assert 0 < count < len(pins()), "an old torch, for tests alone, is left out"
    assert f"audit: {count} packages compared (pypi), 0 with" in capfd.readouterr().err
    assert audited(refusing=["pypi"]) == 0
    assert "compared (osv)" in capfd.readouterr().err


def test_what_an_audit_finds(audited: Audit, capfd: pytest.CaptureFixture[str]) -> None:
    assert audited(bad=["torch"]) == audit.FOUND
    said = capfd.readouterr()
    groups = r"\(base ray hf rl s3 frameworks\)"
    assert re.search(rf"^torch \S+ {groups}: X-1, CVE-1; fixed: 9$", said.out, re.M)
    assert audited("--ignore-vuln", "X-1", bad=["torch"]) == 0


@pytest.mark.parametrize("behaviour", [{"refusing": ["pypi", "osv"]}, {"missing": ["all"]}])
def test_a_list_that_cannot_be_reached(
    audited: Audit, capfd: pytest.CaptureFixture[str], behaviour: dict[str, list[str]]
) -> None:
    """pip-audit itself counts what it could not look up as without vulnerabilities."""
    assert audited(**behaviour) == audit.UNREACHABLE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("audit: no list of vulnerabilities can be reached, nothing was compared")


def test_a_package_that_the_list_has_not(audited: Audit, capfd: pytest.CaptureFixture[str]) -> None:
    assert audited(missing=["torch"]) == audit.UNREACHABLE
    assert re.search(r"audit: the list has nothing about torch \S+$", capfd.readouterr().err)
