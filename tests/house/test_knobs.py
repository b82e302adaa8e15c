"""Users face few flags of Megatron and few variables."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_MOST_FLAGS = 10
_MOST_VARIABLES = 63


def _flags() -> set[str]:
    """Flags that the overlay or a patch adds to Megatron's parser."""
    overlay = (REPOSITORY / "Megatron-LM").rglob("*.py")
    patches = (REPOSITORY / "patches").glob("megatron-*/*/*.patch")
    adds = re.compile(r"""^\+?\s*(?:\w+\.)?add_argument\(\s*['"](--[\w-]*dpu[\w-]*)""", re.M)
    return {flag for source in (*overlay, *patches) for flag in adds.findall(source.read_text())}


def test_megatron_gets_few_flags() -> None:
    flags = _flags()
    assert {"--use-dpu-reduce", "--dpu-optimizer"} <= flags
    assert len(flags) <= _MOST_FLAGS, sorted(flags)


def test_pages_tell_of_few_variables() -> None:
    """What is internal, or set by a launcher, has no entry on the page of settings."""
    page = (REPOSITORY / "docs/use/settings.md").read_text(encoding="utf-8")
    variables = re.findall(r"^### `(\w+)`$", page, re.M)
    assert len(variables) <= _MOST_VARIABLES, variables
