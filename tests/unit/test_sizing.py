"""The sizing calculator, and the examples of docs/use/when-to-use.md."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from byteps import cost_model, sizing

REPOSITORY = Path(__file__).parents[2]
COMMAND = "$ python -m byteps.sizing "
JOB = sizing.Job(
    parameters=1e9,
    hosts=4,
    gpus=8,
    link_gbps=8.0,
    server_link_gbps=8.0,
    optimizer="host",
    gradients="fp32",
    wire="fp32",
    core_bytes_per_s=1e9,
    core_add_bytes_per_s=1e9,
)
"""4e9 bytes at 1e9 bytes a second."""


def test_times_are_the_cost_models() -> None:
    advice = sizing.advise(JOB)
    assert advice.nccl_seconds == pytest.approx(2 * 3 / 4 * 4)
    assert advice.chosen is not None
    assert advice.chosen.machines == 4
    assert advice.chosen.seconds == pytest.approx(4.0)
    assert advice.chosen.gain == pytest.approx(cost_model.gain(4, 4))
    # A byte in, a byte out and a byte added, 1e9 a second each; and one for all else.
    assert advice.chosen.cores == 4
    assert advice.chosen.memory_bytes == 3e9 + sizing.POOL_BYTES + sizing.BASE_BYTES


def test_half_the_bytes_on_the_wire_take_half_the_time() -> None:
    half = sizing.advise(dataclasses.replace(JOB, wire="bf16")).chosen
    assert half is not None
    assert half.seconds == pytest.approx(2.0)
    assert half.gain == pytest.approx(3.0)


def test_optimizer_over_all_ranks_adds_the_parameters() -> None:
    job = dataclasses.replace(JOB, optimizer="ranks", gpus=1)
    # 3/4 of 4e9 bytes of gradients, then 3/4 of 2e9 of parameters.
    assert sizing.nccl_seconds(job) == pytest.approx(4.5)
    # All gradients go up, a quarter comes back; the parameters as before.
    assert sizing.row(job, 4).seconds == pytest.approx(4.0 + 1.5)
    assert sizing.advise(job).chosen is None


def test_slow_server_cards_need_more_machines() -> None:
    advice = sizing.advise(dataclasses.replace(JOB, server_link_gbps=4.0))
    assert advice.chosen is not None
    assert advice.chosen.machines == 8


@pytest.mark.parametrize(
    ("change", "why"),
    [({"hosts": 1}, "one host"), ({"hosts": 2}, "1.00 times")],
)
def test_nccl_alone_where_servers_gain_nothing(change: dict[str, Any], why: str) -> None:
    advice = sizing.advise(dataclasses.replace(JOB, **change))
    assert advice.chosen is None
    assert why in advice.why
    assert "NCCL alone" in sizing.render(JOB, advice)


@pytest.mark.parametrize(
    "words",
    ["--parameters x --hosts 4 --link-gbps 10", "--parameters 1B --hosts 0 --link-gbps 10",
     "--parameters 1B --hosts 4 --link-gbps -1", "--parameters 1B --hosts 4 --link-gbps 10 "
     "--machines -1", "--parameters 1B --hosts 4 --link-gbps nan"],
)  # fmt: skip
def test_bad_use(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sizing.main(words.split())
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert sizing.main(["--parameters", "1B", "--hosts", "4", "--link-gbps", "10", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["job"]["parameters"] == 1e9
    assert [row["machines"] for row in said["rows"]] == [1, 2, 4]
    assert said["chosen"] == said["rows"][-1]


def examples() -> list[tuple[str, str]]:
    """(command, what it prints) of the indented blocks in docs/use/when-to-use.md."""
    text = (REPOSITORY / "docs/use/when-to-use.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.M)
    found = []
    for block in blocks:
        lines = [line[4:] for line in block.strip("\n").splitlines()]
        if lines[0].startswith(COMMAND):
            found.append((lines[0].removeprefix(COMMAND), "\n".join(lines[1:])))
    return found


def test_examples_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    found = examples()
    assert len(found) >= 2
    for command, printed in found:
        assert sizing.main(shlex.split(command)) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()] == [
            line.rstrip() for line in printed.strip().splitlines()
        ]
