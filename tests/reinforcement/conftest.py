"""Tests of verl's trainer through BytePS, on a tiny model.

Only `make test-rl` runs them, in build/venv-rl.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.trainkit.rl_settings import ENVIRONMENTS
from tests.layouts.table import Table

# These variables must be set before verl is imported.
os.environ.update({**ENVIRONMENTS["cpu"], "HF_HUB_OFFLINE": "1"})
# Bytecode makes processes with so many imports a third faster.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base model of the example."""
    from scripts.trainkit import rl_task

    return rl_task.make_model(tmp_path_factory.mktemp("base"))


# Rows of docs/results/integrations.md that are tests: --markdown writes those that passed.


ROWS = {
    "test_a_users_own_command_line": "GRPO by a user's command line, on two Ray nodes",
    "test_the_run_goes_on[ray::WorkerDict-WorkerDict]": "GRPO that restarts after a killed actor",
    "test_a_spare_replaces_a_lost_rank_of_five_roles": (
        "PPO with actor, critic, reference, rollout and reward model; a spare replaces a rank"
    ),
    "test_the_same_bits[dp2]": "verl's engine, DP2, optimizer on ranks or servers",
    "test_the_same_bits_by_twinkle[lora dp2 tp2 local]": "Twinkle, LoRA, DP2 TP2",
    "test_the_same_bits_by_twinkle[tenants dp2 pp2 local]": "Twinkle, LoRA of two tenants, DP2 PP2",
    "test_the_same_bits_by_twinkle[whole dp2 ray]": "Twinkle under Ray, DP2",
    "test_the_same_bits_by_twinkle[whole cp2 local]": "Twinkle, CP2",
    "test_the_same_bits_by_twinkle[whole dp2 pp2 vpp2 local]": "Twinkle, DP2 PP2 VPP2",
}
"""Row of each test, by its name."""
TABLE = Table(
    begin="<!-- made by `make test-rl MARKDOWN=docs/results/integrations.md`; "
    "not to be edited by hand -->",
    head=("training", "works", "test"),
    keys=list(ROWS.values()),
)
_passed: list[list[str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--markdown", type=Path, help="the page to write rows into")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in ROWS and item.get_closest_marker("thorough"):
            raise pytest.UsageError(f"{item.name} is a row, but thorough: CI would not run it")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file, _, name = report.nodeid.rpartition("::")
    if report.when == "call" and report.passed and name in ROWS:
        _passed.append([ROWS[name], "yes", f"`{Path(file).name}::{name}`"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    page = session.config.getoption("--markdown")
    if page and _passed:
        TABLE.put(page, _passed)
