"""Build backend of the distribution: scikit-build-core, applied to the patched BytePS.

If the tree build/byteps is missing, or has a git repository as in a checkout,
`scripts/apply_patches.sh` makes or updates it. That script may fetch upstream's source distribution
with pip. The project's own source distribution contains the tree, so nothing is fetched for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as skbuild
from scikit_build_core.build import prepare_metadata_for_build_wheel

# Editable installations are left out, because they would use the tree's copies. `make setup` links
# the overlay instead.
__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]] | None
"""Settings of a frontend's --config-settings."""
_ROOT = Path(__file__).resolve().parents[1]
_TREE = _ROOT / "build/byteps"


def _assemble() -> None:
    """Make or update the tree.

    Raises:
        SystemExit: this failed. The script has printed the reason.
    """
    if _TREE.is_dir() and not (_TREE / ".git").exists():
        return
    apply: list[str | Path] = [_ROOT / "scripts/apply_patches.sh", "--only", "byteps"]
    env = {**os.environ, "PYTHON": sys.executable}
    if subprocess.run(apply, env=env, check=False).returncode != 0:
        raise SystemExit("error: build/byteps could not be assembled, see above")


def drop_moved_build(settings: Settings) -> None:
    """Delete a build folder that was made under another path, because CMake refuses to use it."""
    folder = Path(str((settings or {}).get("build-dir") or _ROOT / "build/none")).resolve()
    cache = folder / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_CACHEFILE_DIR:INTERNAL={folder}\n" not in cache.read_text():
        shutil.rmtree(folder)


def _fetcher() -> list[str]:
    """Return the packages that `_assemble` needs. An isolated build has no pip by itself."""
    return [] if _TREE.is_dir() else ["pip"]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return skbuild.get_requires_for_build_wheel(config_settings) + _fetcher()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return skbuild.get_requires_for_build_sdist(config_settings) + _fetcher()


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _assemble()
    drop_moved_build(config_settings)
    return skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    _assemble()
    return skbuild.build_sdist(sdist_directory, config_settings)
