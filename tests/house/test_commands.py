"""Commands of README and docs/ name programs, targets and flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAY = REPOSITORY / "byteps"
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.M))


def commands(text: str) -> list[str]:
    """The lines of all code, those that go on in the next one joined; in a line, too."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.S | re.M)
    blocks += re.findall(r"(?:^ {4,}\S.*\n)+", text, re.M)
    blocks += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return [line.strip() for block in blocks for line in block.splitlines()]


def told_by(script: Path) -> str:
    """The text of a script, and of the program that it hands its arguments to."""
    if not script.exists():
        return ""
    text = script.read_text(encoding="utf-8")
    for program in re.findall(r"scripts[/.](\w+)(?:\.py)?\b", text):
        if (script.parent / f"{program}.py").exists():
            text += (script.parent / f"{program}.py").read_text(encoding="utf-8")
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_programs_targets_and_flags_are_there(page: Path) -> None:
    missing = []
    for line in commands(page.read_text(encoding="utf-8")):
        for program in re.findall(r"(?<![\w/.-])(?:scripts|bench|tests)/[\w/.-]+\.\w+", line):
            if not any((folder / program).exists() for folder in (REPOSITORY, OVERLAY)):
                missing.append(f"{program}: {line}")
        for target in re.findall(r"(?:^|[;&] *)make ([a-z][a-z0-9-]*)", line):
            if target not in TARGETS:
                missing.append(f"make {target}: {line}")
        if match := re.match(r"(?:build/venv\S*/bin/python )?(scripts/[\w-]+\.sh)(?= )(.*)", line):
            options = re.split(r" -- |#|\|", match[2])[0]
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", options):
                if flag not in told_by(REPOSITORY / match[1]):
                    missing.append(f"{match[1]} {flag}: {line}")
    assert not missing, "\n".join(missing)


def test_what_is_looked_at() -> None:
    text = "`make no`\n\n    scripts/a.sh --b \\\n        --c\n\n```\nmake x\n```\n"
    assert commands(text) == ["make x", "scripts/a.sh --b          --c", "make no"]


USE = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/use/*.md"))]
COMMAND = re.compile(
    r"(?:\$ |[A-Z_]+=\S+ )*(?:(?:scripts|bench|build|tests)/|"
    r"(?:byteps-server|docker|kubectl|make|openssl|python|sbatch|torchrun)\b)"
)
"""A line that is neither a command of the machine, such as ``cd``, nor what a command prints.
Debian's and Python's installers are the machine's."""
TRIED = {
    r"make setup": ".ci/run",
    r"make train\b(?!.*\b(?:HF|MODE)=)": "tests/megatron/test_train_script.py",
    r"make train MODE=ray": "tests/under_ray/test_train_script.py",
    r"make train HF=": "tests/hugging_face/test_train_script.py",
    r"make rl\b": "tests/reinforcement/test_rl_script.py",
    r"make wheel": "tests/images/test_wheel.py",
    r"make images|(?:\w+=\S+ )?scripts/images\.sh": "tests/images/test_images.py",
    r"scripts/apply_patches\.sh --target": "tests/patches/test_target.py",
    r"byteps-server --new-secret": "tests/multiproc/test_scripts.py",
    r"byteps-server --features": "tests/images/test_bare.py",
    r"scripts/(?:scheduler|server|worker)\.sh": "tests/multiproc/test_scripts.py",
    r"scripts/cluster\.sh": "tests/multiproc/test_cluster_script.py",
    r"scripts/status\.sh": "tests/multiproc/test_status.py",
    r"scripts/check_rdma\.sh": "tests/rdma/test_check_rdma.py",
    r"scripts/merge_traces\.py": "tests/multiproc/test_timeline.py",
    r"scripts/prepare_data\.py": "tests/megatron/test_prepare_data.py",
    r"sbatch": "tests/multiproc/test_slurm.py",
    r"docker compose": "tests/images/test_compose.py",
    r"openssl": "tests/multiproc/authority.py",
    r"torchrun --nproc-per-node 2 try\.py": "tests/multiproc/test_embedded.py",
    r"(?:BYTEPS_\w+=\S+ )*bench/pushpull_bench\.py": "tests/bench/test_end_to_end.py",
    r"\$ python -m byteps\.sizing": "tests/unit/test_sizing.py",
    r"\$ python -m megatron\.core\.distributed\.dpu_reduce\.check": "tests/megatron/test_check.py",
    r"tests/rdma/run_in_vm\.py": "tests/rdma/test_vm.py",
}
"""Commands, and what runs each, or the same with other numbers."""


def blocks_to_run(text: str) -> list[list[str]]:
    """The commands of each indented block, those that go on in the next line joined."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).replace("\\\n", " ")
    found = re.findall(r"(?<=\n\n)(?: {4}\S.*\n)(?: {4,}.*\n|\n(?= {4}))*", text)
    found += re.findall(r"(?<=\n\n)(?: {6}\S.*\n)+", text)  # below an item of a list
    return [[line.strip() for line in block.splitlines() if line.strip()] for block in found]


def not_tried(text: str) -> list[str]:
    """Commands that no test runs and nothing marks as needing what a test has not."""
    if "Commands on this page need a cluster" in text:
        return []
    missing = []
    for block in blocks_to_run(text):
        if not block[0].startswith("# needs"):
            missing += [
                line
                for line in block
                if COMMAND.match(line) and not any(re.match(known, line) for known in TRIED)
            ]
    return missing


@pytest.mark.parametrize("page", USE, ids=lambda page: page.name)
def test_each_command_is_tried_or_says_what_it_needs(page: Path) -> None:
    assert not not_tried(page.read_text(encoding="utf-8"))


def test_what_tries_commands_is_there() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8").replace("\\\n", " ") for page in USE)
    lines = [line for block in blocks_to_run(pages) for line in block]
    for pattern, path in TRIED.items():
        assert (REPOSITORY / path).exists(), path
        assert any(re.match(pattern, line) for line in lines), f"no page has {pattern}"


def test_a_command_that_nothing_tries_is_found() -> None:
    text = "Do:\n\n    make train\n    scripts/new.sh \\\n        --all\n\nor\n\n"
    text += "    # needs a GPU\n    make new\n"
    assert not_tried(text) == ["scripts/new.sh          --all"]
