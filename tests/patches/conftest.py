"""Fixtures of the patch tests. What takes many runs of git is made once and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

# Test folders are no packages; this makes the helper module importable for this folder's tests.
from tests.patches.patch_project import Project, make_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def patched_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patched")
    make_project(folder).patched()
    return folder


@pytest.fixture
def patched(patched_once: Path, tmp_path: Path) -> Project:
    """A project whose upstreams have an overlay file and patches, all applied."""
    return _copy(patched_once, tmp_path)


@pytest.fixture(scope="session")
def two_series_once(patched_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-series")
    project = _copy(patched_once, folder)
    project.add_newest(folder)
    project.ok("apply", "--only", "newest")
    project.commit("trainer/second.py", "    reduce()", "    hook()", "second: hook too", "newest")
    project.ok("export")
    return folder


@pytest.fixture
def two_series(two_series_once: Path, tmp_path: Path) -> Project:
    """The patched project with an upstream more, `newest`, whose series shares the trainer's patch
    and has one of its own."""
    project = _copy(two_series_once, tmp_path)
    lock = project.root / "upstream.lock"
    lock.write_text(lock.read_text().replace(str(two_series_once), str(tmp_path)))
    return project


def _copy(folder: Path, destination: Path) -> Project:
    shutil.copytree(folder, destination, symlinks=True, dirs_exist_ok=True)
    return Project(root=destination / "project", cache=destination / "cache")
