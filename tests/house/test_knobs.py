"""Checks that users have few flags and variables, and that one table reads all variables."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_MOST_FLAGS = 10
_MOST_VARIABLES = 60


def _flags() -> set[str]:
    """Find flags that the overlay or a patch adds to Megatron's parser."""
    overlay = (REPOSITORY / "Megatron-LM").rglob("*.py")
    patches = (REPOSITORY / "patches").glob("megatron-*/*/*.patch")
    adds = re.compile(r"""^\+?\s*(?:\w+\.)?add_argument\(\s*['"](--[\w-]*dpu[\w-]*)""", re.M)
    return {flag for source in (*overlay, *patches) for flag in adds.findall(source.read_text())}


def test_megatron_gets_few_flags() -> None:
    flags = _flags()
    assert {"--use-dpu-reduce", "--dpu-optimizer"} <= flags
    assert len(flags) <= _MOST_FLAGS, sorted(flags)


def test_pages_tell_of_few_variables() -> None:
    """Variables that are internal, or set by a launcher, are not on the page of settings."""
    page = (REPOSITORY / "docs/use/settings.md").read_text(encoding="utf-8")
    variables = re.findall(r"^### `(\w+)`$", page, re.M)
    assert len(variables) <= _MOST_VARIABLES, variables


_READERS = {
    "byteps/byteps/base/config.cc": "the table's parser",
    "byteps/byteps/base/log.cc": "lines are written before the settings are known, and of these",
    "byteps/byteps/c10d_plugin.py": "torch imports it, before byteps.torch can be",
    "byteps/byteps/torch/c10d/work.py": "CUDA_DEVICE_MAX_CONNECTIONS, of NVIDIA",
    "byteps/byteps/torch/world.py": "finds a rank's place as the launcher does",
    "Megatron-LM/megatron/core/distributed/dpu_reduce/parameters.py": "a script's own, for a while",
    "Megatron-LM/megatron/core/distributed/dpu_reduce/replica_refusals.py": "without byteps, too",
    "Megatron-LM/megatron/training/cpu_platform.py": "MEGATRON_CPU, without byteps, too",
    "integrations/rl/megatron_byteps_rl/engines.py": "variables of verl and CUDA",
    "integrations/rl/megatron_byteps_rl/metrics_file.py": "variables of verl",
    "integrations/rl/megatron_byteps_rl/plugin.py": "variables of verl",
    "integrations/rl/megatron_byteps_rl/store.py": "variables of the storage client",
    "integrations/rl/megatron_byteps_rl/warm_worker.py": "variables of verl and CUDA",
}
"""Files that read or set variables of this process, and the reason why the table cannot."""
_LAUNCHERS = re.compile(
    r"byteps/byteps/(cli|launcher|trial)/.*|integrations/ray/.*|integrations/rl/megatron_byteps_rl/__main__\.py"
)
"""Files that may: they make the environment of their child processes."""
_READS = {
    ".cc": re.compile(r"\b(?:GetEnv|getenv|secure_getenv|setenv|unsetenv|putenv|environ)\b"),
    ".py": re.compile(r"\bos\.(?:environ|getenv|putenv)\b|\bfrom os import.*\benviron\b"),
}
_READS[".h"] = _READS[".cc"]


def test_one_table_reads_the_environment() -> None:
    """Other code gets typed values: C++ structs (NetSettings), `setting()` in Python."""
    readers = set()
    for folder in ("byteps/byteps", "Megatron-LM", "integrations"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            name = path.relative_to(REPOSITORY).as_posix()
            reads = _READS.get(path.suffix)
            if reads is None or "/tests/" in name or _LAUNCHERS.fullmatch(name):
                continue
            if reads.search(path.read_text(encoding="utf-8")):
                readers.add(name)
    assert readers == set(_READERS)
