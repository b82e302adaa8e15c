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
from byteps.sizing import __main__ as command_line

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
"""4e9 bytes at 1e9 bytes per second."""


def test_times_are_the_cost_models() -> None:
    advice = sizing.advise(JOB)
    assert advice.nccl_seconds == pytest.approx(2 * 3 / 4 * 4)
    assert advice.chosen is not None
    assert advice.chosen.machines == 4
    assert advice.chosen.seconds == pytest.approx(4.0)
    assert advice.chosen.gain == pytest.approx(cost_model.gain(4, 4))
    # A byte in, a byte out and a byte added, 1e9 per second each; and one for all else.
    assert advice.chosen.cores == 4
    # A worker adds nothing.
    assert advice.chosen.worker_cores == 3
    assert advice.chosen.memory_bytes == 3e9 + sizing.POOL_BYTES + sizing.BASE_BYTES


def test_half_the_bytes_on_the_wire_take_half_the_time() -> None:
    half = sizing.advise(dataclasses.replace(JOB, wire="bf16")).chosen
    assert half is not None
    assert half.seconds == pytest.approx(2.0)
    assert half.gain == pytest.approx(3.0)


@pytest.mark.parametrize(("wire", "bits", "held"), [("int8", 8, 5), ("int4", 4, 6.5)])
def test_few_bits(wire: str, bits: int, held: float) -> None:
    few = sizing.advise(dataclasses.replace(JOB, wire=wire)).chosen
    assert few is not None
    # 1e9 values of so many bits, and of each 128 values a scale of 16.
    pushed = 1e9 * (bits + 16 / 128) / 8
    assert few.seconds == pytest.approx(pushed / 1e9)
    assert few.gain == pytest.approx(6 / few.seconds)
    # As they came, added in fp32, and with int4 what was lost: of 1e9 values on four servers, each
    # from four hosts.
    values = few.memory_bytes - sizing.POOL_BYTES - sizing.BASE_BYTES
    assert values == pytest.approx((pushed + (held - bits / 8) // 1 * 1e9) / 4, rel=0.01)


@pytest.mark.parametrize(
    ("wire", "up", "down", "kept"),
    [("bf16", 2, 2, 14), ("int8", 130 / 128, 130 / 128, 18), ("int4", 66 / 128, 130 / 128, 16)],
)
def test_servers_that_keep_the_optimizer_send_parameters_and_remember_them(
    wire: str, up: float, down: float, kept: int
) -> None:
    job = dataclasses.replace(JOB, optimizer="servers", wire=wire, gpus=1)
    plain = dataclasses.replace(job, optimizer="host")
    ranks = dataclasses.replace(job, optimizer="ranks")
    assert sizing.nccl_seconds(job) == sizing.nccl_seconds(ranks)
    found, other = (sizing.row(one, job.hosts) for one in (job, plain))
    assert found.seconds == pytest.approx(other.seconds * max(up, down) / up, rel=1e-3)
    more = found.memory_bytes - other.memory_bytes
    assert more == pytest.approx(job.parameters / job.hosts * kept, rel=0.01)


def test_copies_of_the_state_take_memory_and_bandwidth_of_servers() -> None:
    job = dataclasses.replace(JOB, optimizer="servers", wire="bf16", gpus=1)
    plain, copied = (sizing.row(dataclasses.replace(job, backup=on), 8) for on in (False, True))
    # Eight machines of the model's 2e9 bytes each: 4 hosts push an eighth to each, which sends the
    # sum on, and is sent another one.
    assert copied.nic_gbps * copied.seconds == pytest.approx(plain.nic_gbps * plain.seconds * 5 / 4)
    more = copied.memory_bytes - plain.memory_bytes
    # The state of 14 bytes per parameter once more, and the last answer twice.
    assert more == pytest.approx(job.parameters / 8 * (14 + 2 + 2), rel=0.01)
    with pytest.raises(ValueError, match="--optimizer servers"):
        dataclasses.replace(JOB, backup=True)


def test_optimizer_over_all_ranks_adds_the_parameters() -> None:
    job = dataclasses.replace(JOB, optimizer="ranks", gpus=1)
    # 3/4 of 4e9 bytes of gradients, then 3/4 of 2e9 of parameters.
    assert sizing.nccl_seconds(job) == pytest.approx(4.5)
    # All gradients go up, a quarter comes back; the parameters as before.
    assert sizing.row(job, 4).seconds == pytest.approx(4.0 + 1.5)
    assert sizing.advise(job).chosen is None


def test_slow_server_nics_need_more_machines() -> None:
    advice = sizing.advise(dataclasses.replace(JOB, server_link_gbps=4.0))
    assert advice.chosen is not None
    assert advice.chosen.machines == 8


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_all_nics_of_a_host_are_used(transport: str) -> None:
    job = dataclasses.replace(JOB, nics=2, transport=transport)
    one = dataclasses.replace(JOB, transport=transport)
    assert sizing.nccl_seconds(job) == pytest.approx(3.0)
    # Servers whose machines carry as much as the workers' hosts.
    both = dataclasses.replace(job, server_link_gbps=16.0)
    assert sizing.row(both, 4).seconds == pytest.approx(sizing.row(one, 4).seconds / 2)
    assert sizing.row(both, 4).gain == pytest.approx(sizing.row(one, 4).gain)
    assert sizing.row(both, 4).nic_gbps == pytest.approx(16.0)
    advice = sizing.advise(job)
    assert 8 in {row.machines for row in advice.rows}, "with one NIC each, two for each host"


def test_few_cores_set_the_time() -> None:
    # Four bytes in and four out, at 1e9 per second and core: 8 s for the one that is left.
    few = sizing.row(dataclasses.replace(JOB, worker_cores=2), 4)
    assert few.seconds == pytest.approx(8.0)
    assert few.worker_cores == 2
    # The same of a server, and four bytes added.
    few = sizing.row(dataclasses.replace(JOB, server_cores=2), 4)
    assert few.seconds == pytest.approx(12.0)
    assert few.cores == 2


def test_servers_on_a_workers_host_need_its_cores() -> None:
    job = dataclasses.replace(JOB, hosts=2)
    beside = sizing.row(job, 1)
    assert (beside.processes, beside.local) == (1, 1)
    # A third of 4e9 bytes is summed there: from two hosts, to two hosts, added; 2 s in all.
    busy = cost_model.core_seconds(
        cost_model.Servers(hosts=2, extra=1, local=1), 4e9, 4e9, core_rate=1e9, add_rate=1e9
    )
    assert busy.host == pytest.approx(8 + 2 * 3 * 4 / 3)
    assert busy.server == pytest.approx(2 * 3 * 4 / 3)
    assert beside.worker_cores == busy.host / beside.seconds + sizing.OTHER_CORES


def test_what_more_cores_would_give() -> None:
    advice = sizing.advise(dataclasses.replace(JOB, worker_cores=2), machines=4)
    assert advice.chosen is None
    assert "With 3 cores on a worker's host it would be 1.50 times as fast; or use RDMA" in (
        advice.why
    )
    slow = sizing.advise(dataclasses.replace(JOB, server_cores=3.5, wire="bf16"))
    assert slow.chosen is not None
    assert "With 4 cores on a server's machine it would be 3.00 times" in slow.why
    assert "cores" not in sizing.advise(JOB).why


def test_with_rdma_nics_move_the_bytes() -> None:
    job = dataclasses.replace(
        JOB, transport="rdma", worker_cores=2, link_gbps=400.0, server_link_gbps=400.0,
        core_add_bytes_per_s=50e9,
    )  # fmt: skip
    advice = sizing.advise(job)
    assert advice.chosen is not None
    assert advice.chosen.gain == pytest.approx(1.5)
    assert (advice.chosen.cores, advice.chosen.worker_cores) == (2, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hosts": 1}, "one host"),
        ({"hosts": 2}, "1.00 times"),
    ],
)
def test_nccl_alone_where_servers_gain_nothing(change: dict[str, Any], why: str) -> None:
    advice = sizing.advise(dataclasses.replace(JOB, **change))
    assert advice.chosen is None
    assert why in advice.why
    assert "NCCL alone" in command_line.render(JOB, advice)


@pytest.mark.parametrize(
    "words",
    ["--parameters x --hosts 4 --link-gbps 10", "--parameters 1B --hosts 0 --link-gbps 10",
     "--parameters 1B --hosts 4 --link-gbps -1", "--parameters 1B --hosts 4 --link-gbps 10 "
     "--machines -1", "--parameters 1B --hosts 4 --link-gbps nan",
     "--parameters 1B --hosts 4 --link-gbps 10 --server-link-gbps 0",
     "--parameters 1B --hosts 4 --link-gbps 10 --nics 0",
     "--parameters 1B --hosts 4 --link-gbps 10 --worker-cores 1",
     "--parameters 1B --hosts 4 --link-gbps 10 --server-cores nan"],
)  # fmt: skip
def test_bad_use(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(words.split())
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--parameters 7 --hosts 4 --link-gbps 10", "7 parameters: a rank has 1 million"),
        ("--parameters 7000B --hosts 4 --link-gbps 10", "tensor and pipeline parallelism"),
        ("--parameters 7B --hosts 8 --link-gbps 3200", "no NIC is faster than 1600"),
        ("--parameters 7B --hosts 8 --link-gbps 3200 --transport rdma", "--nics"),
        ("--parameters 7B --hosts 8 --link-gbps 400", "would need 50 cores. Use RDMA"),
        (
            "--parameters 7B --hosts 8 --link-gbps 100 --nics 4",
            "400 Gbit/s of a worker's host: TCP is for up to 100 Gbit/s",
        ),
        (
            "--parameters 7B --hosts 8 --link-gbps 100 --server-link-gbps 200",
            "200 Gbit/s of a server: TCP is for up to 100 Gbit/s",
        ),
    ],
)
def test_no_advice_for_what_is_no_size_or_cannot_help(
    words: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(words.split())
    assert end.value.code == 2
    said = capsys.readouterr()
    assert what in said.err
    assert "Advice" not in said.out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command_line.main(["--parameters", "1B", "--hosts", "4", "--link-gbps", "10", "--json"])
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["job"]["parameters"] == 1e9
    assert said["job"]["worker_cores"] is None
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
    assert found
    for command, printed in found:
        assert command_line.main(shlex.split(command)) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()] == [
            line.rstrip() for line in printed.strip().splitlines()
        ]
