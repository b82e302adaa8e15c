"""Refuses to run if another distribution owns the same files.

Upstream's distribution `byteps`, and wheels of this project before 1.0, have a package `byteps`
too. If both are installed, one has overwritten files of the other. In that case importing this
module raises ImportError.
"""

from __future__ import annotations

from pathlib import Path


def refuse_another(site: Path) -> None:
    """Check the folder that holds the package `byteps`. Only names of files are read, so this takes
    a fraction of a ms.

    Raises:
        ImportError: a distribution named `byteps` is installed there.
    """
    for other in sorted(site.glob("byteps-[0-9]*-info")):
        raise ImportError(
            f"{site} holds {other.name} and megatron-byteps: both have the package 'byteps', and "
            "files of one overwrite those of the other. Keep one of them: "
            "pip uninstall byteps megatron-byteps; pip install megatron-byteps"
        )


refuse_another(Path(__file__).parent.parent)
