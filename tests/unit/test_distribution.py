"""The package refuses to run if another distribution owns the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
from byteps.distribution import refuse_another

OTHERS = (
    "byteps-0.2.5.post15.dist-info",
    "byteps-0.2.5.post15-py3.12.egg-info",
    "byteps-0.2.5.post15+megatron.5.dist-info",
)


@pytest.mark.parametrize("name", OTHERS)
def test_another_distribution_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ImportError, match=r"pip uninstall byteps megatron-byteps; pip install"):
        refuse_another(tmp_path)


def test_distributions_of_other_names_are_not_refused(tmp_path: Path) -> None:
    for name in ("megatron_byteps-1.0.0.dist-info", "byteps_tools-1.0.dist-info", "byteps"):
        (tmp_path / name).mkdir()
    refuse_another(tmp_path)
