"""The sizing calculator, and the examples of docs/use/when-to-use.md."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byteps import cost_model, sizing
from byteps.forecast import Machines, Needs, Row, Training, answer
from byteps.forecast.needs import BASE_BYTES, POOL_BYTES
from byteps.forecast.training import SHARDED
from byteps.sizing import Choice, advised, choices, training_of

REPOSITORY = Path(__file__).parents[2]
COMMAND = "$ megatron-byteps sizing "
MACHINES = Machines(hosts=4, gpus=8, link_gbps=8.0, core_rate=1e9, add_rate=1e9)
"""Machines whose cores add and move 1e9 bytes per second."""


def training(**change: Any) -> Training:
    """1e9 parameters on each of 32 ranks; hosts shard the optimizer."""
    words = {"parameters": 1e9, "hosts": 4, "gpus": 8, "optimizer": "host", "gradients": "fp16"}
    return training_of(**{"accepts": None, **words, **change})


def choice(spare: int, machines: Machines = MACHINES, **change: Any) -> Choice:
    change = {"hosts": machines.hosts, "gpus": machines.gpus, **change}
    (chosen,) = choices(training(**change), machines, spare)
    return chosen


def best(chosen: Choice) -> tuple[Row, Needs]:
    """Get the recommended row and its needs."""
    row = chosen.forecast.best
    return row, chosen.needs(row)


def test_times_are_the_cost_models() -> None:
    """2e9 bytes of gradients at 1e9 bytes per second."""
    chosen = advised(choices(training(), MACHINES, None))
    assert chosen.forecast.plain.seconds == pytest.approx(2 * 3 / 4 * 2)
    row, needs = best(chosen)
    assert chosen.spare == 4
    assert row.seconds == pytest.approx(2.0) and row.gain == pytest.approx(cost_model.gain(4, 4))
    # Each byte comes in, goes out and is added, at 1e9 per second. One more core does other work.
    assert needs.server_cores == 4
    # A worker adds nothing.
    assert needs.worker_cores == 3 and needs.worker_bytes == 0
    assert needs.server_bytes == 3 * 2e9 / 4 + POOL_BYTES + BASE_BYTES


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize(("accepts", "nbytes"), [("int8", 130 / 128), ("int4", 66 / 128)])
def test_servers_on_the_hosts_have_an_answer(hosts: int, accepts: str, nbytes: float) -> None:
    chosen = choice(0, replace(MACHINES, hosts=hosts), accepts=accepts)
    row, needs = best(chosen)
    assert row.gain == pytest.approx(2 / nbytes)
    said = sizing.render([chosen], 1e9)
    four_bits = "--use-dpu-reduce --dpu-reduce-wire-dtype int4"
    line = four_bits if accepts == "int4" else "--dpu-preset own-hosts"
    assert f"Answer: in {accepts} or more: add {line} (" in said
    launcher = f"torchrun --nnodes {hosts} --nproc-per-node 8 ..."
    assert f"\n  {launcher} pretrain_gpt.py ... {line}\n" in said
    variables = f"BYTEPS_C10D=1 BYTEPS_C10D_WIRE_DTYPE={accepts}"
    assert f"\n  {variables} {launcher} train.py" in said
    variables = f"BYTEPS_C10D=1 BYTEPS_FSDP_DTYPES={accepts},int8"
    assert said.endswith(f"\n  {variables} {launcher} train.py")
    assert needs.server_cores == 0 == needs.server_bytes and needs.worker_bytes > 1e9
    assert "<- advised" in said


@pytest.mark.parametrize(("wire", "bits", "held"), [("int8", 8, 5), ("int4", 4, 6.5)])
def test_few_bits(wire: str, bits: int, held: float) -> None:
    row, needs = best(choice(4, accepts=wire))
    # 1e9 values of this many bits, and a 16-bit scale for each 128 values.
    pushed = 1e9 * (bits + 16 / 128) / 8
    assert row.seconds == pytest.approx(pushed / 1e9) and row.gain == pytest.approx(3 / row.seconds)
    # Each of four servers keeps 1e9 received values, the fp32 sums and, with int4, the feedback.
    values = needs.server_bytes - POOL_BYTES - BASE_BYTES
    assert values == pytest.approx((pushed + (held - bits / 8) // 1 * 1e9) / 4, rel=0.01)


@pytest.mark.parametrize(("wire", "times_state"), [(None, 14), ("int8", 18), ("int4", 16)])
def test_servers_that_keep_the_optimizer_remember_parameters(
    wire: str | None, times_state: int
) -> None:
    machines = replace(MACHINES, gpus=1)
    chosen = choice(4, machines, optimizer="servers", accepts=wire)
    rows = [row for row in chosen.forecast.rows if row.wire == wire and row.through_servers]
    (served,) = (row for row in rows if row.optimizer == "servers")
    on_ranks = choice(4, machines, optimizer="replicated").forecast.rows
    rows = [row for row in on_ranks if row.wire == wire and row.through_servers]
    (plain,) = (row for row in rows if row.optimizer == "ranks")
    more = chosen.needs(served).server_bytes - chosen.needs(plain).server_bytes
    assert more == pytest.approx(1e9 / 4 * times_state, rel=0.01)


def test_copies_of_the_state_take_memory_and_bandwidth_of_servers() -> None:
    machines = replace(MACHINES, gpus=1)
    both = [choice(8, replace(machines, backup=on), optimizer="servers") for on in (False, True)]
    plain, copied = (each.needs(each.forecast.best) for each in both)
    times = [each.forecast.best.seconds for each in both]
    # Each of the eight machines keeps 2e9 / 8 bytes of the model. It receives as many from each of
    # 4 hosts. With copies it receives as many from another machine, too: 5 parts instead of 4.
    assert copied.nic_gbps * times[1] == pytest.approx(plain.nic_gbps * times[0] * 5 / 4)
    # A copy needs memory for the state, 14 bytes per parameter, and twice for the last answer of 2
    # bytes.
    more = copied.server_bytes - plain.server_bytes
    assert more == pytest.approx(1e9 / 8 * (14 + 2 + 2), rel=0.01)


def test_slow_server_nics_need_more_machines() -> None:
    machines = replace(MACHINES, server_link_gbps=4.0)
    assert advised(choices(training(), machines, None)).spare == 8


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_all_nics_of_a_host_are_used(transport: str) -> None:
    machines = replace(MACHINES, nics=2, transport=transport)
    assert choice(4, machines).forecast.plain.seconds == pytest.approx(1.5)
    # Servers on machines with the network rate of the workers' hosts.
    single = choice(4, replace(MACHINES, transport=transport))
    both = choice(4, replace(machines, server_link_gbps=16.0))
    assert both.forecast.best.seconds == pytest.approx(single.forecast.best.seconds / 2)
    assert both.forecast.best.gain == pytest.approx(single.forecast.best.gain)
    assert best(both)[1].nic_gbps == pytest.approx(16.0)
    several = choices(training(), machines, None)
    assert 8 in {each.spare for each in several}, "with one NIC each, two for each host"


def test_few_cores_set_the_time() -> None:
    def by_servers(machines: Machines) -> tuple[Row, Needs]:
        chosen = choice(4, machines)
        row = chosen.forecast.by_servers()[0]
        return row, chosen.needs(row)

    # Two bytes in and two out, at 1e9 per second and core: 4 s on the remaining core.
    row, needs = by_servers(replace(MACHINES, worker_cores=2))
    assert row.seconds == pytest.approx(4.0) and needs.worker_cores == 2
    # A server moves as many bytes, and adds two bytes: 6 s on the remaining core.
    row, needs = by_servers(replace(MACHINES, server_cores=2))
    assert row.seconds == pytest.approx(6.0) and needs.server_cores == 2


def test_servers_on_a_workers_host_need_its_cores() -> None:
    chosen = choice(1, replace(MACHINES, hosts=2))
    servers = chosen.forecast.network.servers
    assert (servers.per_machine, servers.local) == (1, 1)
    row = chosen.forecast.by_servers()[0]
    # A third of 2e9 bytes is summed on each machine: it comes from two hosts, is added, and goes to
    # two hosts.
    busy = cost_model.core_seconds(servers, 2e9, 2e9, core_rate=1e9, add_rate=1e9)
    assert busy.host == pytest.approx(4 + 2 * 3 * 2 / 3)
    assert chosen.needs(row).worker_cores == busy.host / row.seconds + 1


def test_what_more_cores_would_give() -> None:
    few = choice(4, replace(MACHINES, worker_cores=2))
    assert few.forecast.best.plain
    assert "With 3 cores on a worker's host, --use-dpu-reduce: 1.50 x; or use RDMA" in (
        sizing.render([few], 1e9)
    )
    slow = choice(4, replace(MACHINES, server_cores=3.5))
    assert "With 4 cores on a spare machine, --use-dpu-reduce: 1.50 x" in sizing.render([slow], 1e9)
    assert "cores on" not in sizing.render([choice(4)], 1e9)


def test_with_rdma_nics_move_the_bytes() -> None:
    machines = replace(MACHINES, transport="rdma", worker_cores=2, link_gbps=400.0, add_rate=50e9)
    chosen = advised(choices(training(), machines, None))
    row, needs = best(chosen)
    assert row.gain == pytest.approx(1.5) and (needs.server_cores, needs.worker_cores) == (2, 1)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [(1, "no gradient crosses hosts"), (2, "change nothing: servers are less than 1.1 x")],
)
def test_nothing_to_change_where_servers_gain_nothing(hosts: int, said: str) -> None:
    machines = replace(MACHINES, hosts=hosts)
    several = choices(training(hosts=hosts), machines, None)
    assert advised(several).spare == 0
    assert said in answer(advised(several).forecast) and said in sizing.render(several, 1e9)


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
        sizing.main(words.split())
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--parameters 7 --hosts 4 --link-gbps 10", "7 parameters: a rank has 1 million"),
        ("--parameters 7000B --hosts 4 --link-gbps 10", "tensor and pipeline parallelism"),
        ("--parameters 7B --hosts 8 --link-gbps 3200", "no NIC is faster than 1600"),
        ("--parameters 7B --hosts 8 --link-gbps 3200 --transport rdma", "--nics"),
        (
            "--parameters 7B --hosts 8 --link-gbps 10 --for ddp --optimizer servers",
            "--optimizer servers is Megatron's",
        ),
    ],
)
def test_no_advice_for_what_is_no_size_or_cannot_help(
    words: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sizing.main(words.split())
    assert end.value.code == 2
    said = capsys.readouterr()
    assert what in said.err
    assert "Answer" not in said.out


def test_a_script_without_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--for ddp --parameters 1B --hosts 4 --link-gbps 10 --machines"
    assert sizing.main(f"{words} 0".split()) == 0
    line = "BYTEPS_C10D=1 BYTEPS_C10D_WIRE_DTYPE=int8 torchrun --nnodes 4 --nproc-per-node 8 ..."
    assert capsys.readouterr().out.endswith(f"\n  {line} train.py\n")
    assert sizing.main(f"{words} 4".split()) == 0
    said = capsys.readouterr().out
    assert "\n  BYTEPS_C10D=1 torchrun --nnodes 4 " in said
    assert said.endswith("... train.py\n") and "Megatron" not in said
    assert sizing.main(words.removesuffix(" --machines").split()) == 0
    said = capsys.readouterr().out
    own = next(line for line in said.splitlines() if line.startswith("Without spare machines"))
    assert "BYTEPS_C10D_WIRE_DTYPE=int8 (1.97 x)" in own


def lines_of(said: str) -> dict[str, tuple[str, str]]:
    """Get the gain, and the cores of a host, by what a user adds for a line of the calculator."""
    row = r"^ +(\d+) +\d+ +\S+ +\d+ +\w+ +\w+ +[0-9,.]+ +(\d\.\d\d) +[0-9.]+ +\S+ +(\d+)"
    rows = {number: tuple(other) for number, *other in re.findall(row, said, re.MULTILINE)}
    needs = re.findall(r"^  ([0-9, ]+): add (.*)$", said, re.MULTILINE)
    lines = {
        words: [rows.pop(number) for number in numbers.split(", ")] for numbers, words in needs
    }
    assert not rows, "each line says what it needs"
    return {words: (first[0], first[1]) for words, (first, *_) in lines.items()}


def test_tables_by_hosts_and_nics(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables of docs/use/when-to-use.md that give an answer at a glance."""
    text = (REPOSITORY / "docs/use/when-to-use.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d) . (\d+) GbE \| (.*) \|$", text, re.MULTILINE)
    gains = {
        program: re.search(rf"^\| {name}.*$", text, re.MULTILINE)
        for program, name in (("megatron", "Megatron"), ("ddp", "DDP, HSDP"), ("fsdp", "FSDP2, 4"))
    }
    assert len(rows) == 6
    for hosts, nics, gbps, shown in rows:
        words = f"--parameters 7B --hosts {hosts} --nics {nics} --link-gbps {gbps} --machines 0"
        for program, row in gains.items():
            assert sizing.main([*words.split(), "--for", program]) == 0
            said = capsys.readouterr().out
            if shown.startswith("NCCL"):
                assert program == "fsdp" or "with fewer bits" not in said
                assert program != "megatron" or "TCP is counted with 100 Gbit/s of" in said
                continue
            lines = lines_of(said)
            if program == "megatron":
                lines = {
                    re.sub(r"(.*)( --num-\S+) \d", rf"\1 {SHARDED}\2 HOSTS", added): numbers
                    for added, numbers in lines.items()
                }
                hidden = re.search(r"Where a micro-batch computes for (\S+) s", said)
                assert hidden
                (_, cores) = lines["--dpu-preset own-hosts"]
                assert shown == f"servers | {cores} | {hidden[1]} s"
            if program != "fsdp" or hosts == "4":
                few = [added for added in lines if "=same" not in added]
                assert row and all(f"`{added}`: {lines[added][0]}" in row[0] for added in few)
                assert len(few) == row[0].count("`: ")


def examples() -> list[tuple[str, str]]:
    """Get (command, its output) of the indented blocks in docs/use/when-to-use.md."""
    text = (REPOSITORY / "docs/use/when-to-use.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.M)
    shown = []
    for block in blocks:
        lines = [line[4:] for line in block.strip("\n").splitlines()]
        if lines[0].startswith(COMMAND):
            shown.append((lines[0].removeprefix(COMMAND), "\n".join(lines[1:])))
    return shown


def test_examples_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    shown = examples()
    assert shown
    for command, printed in shown:
        assert sizing.main(shlex.split(command)) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()] == [
            line.rstrip() for line in printed.strip().splitlines()
        ]
