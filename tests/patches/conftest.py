"""Fixtures of the patch tests."""

from __future__ import annotations

from pathlib import Path

import pytest

# Test folders are no packages; this makes the helper module importable for this folder's tests.
from tests.patches.patch_project import Project, make_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture
def patched(project: Project) -> Project:
    """A project whose upstreams have an overlay file and patches, all applied."""
    project.patched()
    return project
