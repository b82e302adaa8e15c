"""Parts that need no cluster: finding the failed process, fitting layouts, phases, settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.ray_failures.cases import ENVIRONMENT
from bench.ray_failures.nodes import Nodes
from megatron_byteps_ray import settings
from megatron_byteps_ray.cluster import Pool
from megatron_byteps_ray.generation import Phases
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.rank_actor import RankActor
from megatron_byteps_ray.recovery import FAILED, HUNG, KILLED, LOST, End, Failure
from megatron_byteps_ray.settings import (
    Layout,
    Limits,
    Settings,
    gpu_numbers,
    local_variables,
    option,
)
from megatron_byteps_ray.step_reports import StepReports
from tests.layouts.job import gpus_to_offer, take_a_share


def _end(who: str, kind: str, at: float = 0.0, line: str = "") -> End:
    status = {KILLED: -9, FAILED: 1}.get(kind)
    return End(who=who, kind=kind, at=at, status=status, lines=[line] if line else [])


BLAMES = {
    "a lost actor before those that fail for it": (
        [
            _end("rank 0", FAILED, 1.0, "BytePSError: worker 1 was lost"),
            _end("server 0", FAILED, 0.9),
            _end("rank 1", LOST, 2.0),
        ],
        ["rank 1"],
    ),
    "both that were killed at once": (
        [_end("rank 1", KILLED, 1.0), _end("rank 0", KILLED, 1.1), _end("scheduler", FAILED)],
        ["rank 1", "rank 0"],
    ),
    "an error of its own before one that tells of another's": (
        [
            _end("rank 0", FAILED, 1.0, "BytePSError: worker 1 (10.0.0.3) was lost"),
            _end("rank 1", FAILED, 1.1, "ValueError: no such file"),
        ],
        ["rank 1"],
    ),
    "the first of several errors": (
        [
            _end("rank 2", FAILED, 1.1, "ValueError: x"),
            _end("rank 0", FAILED, 1.0, "ValueError: x"),
        ],
        ["rank 0"],
    ),
    "who hangs": ([_end("rank 3", HUNG), _end("server 0", FAILED)], ["rank 3"]),
}


@pytest.mark.parametrize(("ends", "causes"), BLAMES.values(), ids=BLAMES)
def test_a_failure_names_its_causes(ends: list[End], causes: list[str]) -> None:
    failure = Failure.of(ends)
    assert [end.who for end in failure.causes] == causes
    assert len(failure.causes) + len(failure.others) == len(ends)
    assert causes[0] in str(failure)


def test_options_are_found_in_both_spellings() -> None:
    arguments = ["--save", "a", "--load=b", "--save", "c"]
    assert option(arguments, "--save") == "c"
    assert option(arguments, "--load") == "b"
    assert option(arguments, "--loa") is None


@pytest.mark.parametrize(
    ("arguments", "available", "largest"),
    [
        ("", 7, 7),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2", 7, 4),
        ("--tensor-model-parallel-size 4", 3, 0),
        ("--micro-batch-size 2 --global-batch-size 8", 3, 2),
        ("--micro-batch-size 2 --global-batch-size 8 --context-parallel-size 2", 7, 4),
        ("--expert-model-parallel-size 2", 3, 2),
    ],
)
def test_numbers_of_ranks_that_fit(arguments: str, available: int, largest: int) -> None:
    assert Layout.of(arguments.split()).largest(available) == largest


def test_a_layout_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="--tensor-model-parallel-size two"):
        Layout.of(["--tensor-model-parallel-size", "two"])


def test_phases_add_up() -> None:
    phases = Phases(failed_at=100.0)
    for name, at in (("noticed", 101.0), ("servers", 104.0), ("groups", 106.0), ("step", 110.0)):
        phases.end(name, at)
    phases.end("groups", 105.0)  # from another rank: the last value counts
    parts = phases.seconds()
    assert parts == {"noticed": 1.0, "servers": 3.0, "groups": 2.0, "step": 4.0, "total": 10.0}
    assert sum(parts.values()) == 2 * parts["total"]
    assert "scheduler and servers listen" in phases.table()


def test_steps_that_a_lost_rank_did_not_say_are_known_from_another() -> None:
    reports = StepReports()

    def take(rank: int, *numbers: int) -> list[bool]:
        return [reports.take(rank, {"step": number}) for number in numbers]

    def missing() -> list[tuple[int, int]]:
        return [(rank, step["step"]) for rank, step in reports.missing()]

    assert missing() == []
    assert take(1, 5, 6) == [True, True]
    assert take(0, 5) == [False] and missing() == []  # the report comes after the reporter's end
    assert take(2, 5, 6, 7, 8) == [False] * 4
    assert take(0, 6, 7) == [False] * 2
    assert missing() == [(2, 7), (2, 8)]
    assert take(1, 7) == [True]
    assert missing() == [(2, 8)]
    assert take(1, 8) == [True]
    assert missing() == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ranks": 0}, "ranks must be 1 or more"),
        ({"min_ranks": 3}, "min_ranks must be from 1 to 2"),
        ({"gpus_per_rank": 2.0}, "one GPU, a part of one, or none: not 2"),
        ({"entry": "train"}, "a .py file or module:function"),
    ],
)
def test_bad_settings_are_named(values: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**{"entry": "train.py", **values})
    with pytest.raises(ValueError, match="the limit 'step'"):
        Limits(step=0)


def test_the_secret_is_the_environment_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BYTEPS_AUTH", "BYTEPS_SECRET", "BYTEPS_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings(entry="train.py")
    assert len(settings.secret()) == 64 and settings.secret() != settings.secret()
    assert Settings(entry="train.py", servers=0).secret() == ""
    file = tmp_path / "secret"
    monkeypatch.setenv("BYTEPS_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match="BYTEPS_SECRET_FILE"):
        settings.secret()
    file.write_text("a secret of some length\n")
    assert settings.secret() == "a secret of some length"
    assert "BYTEPS_SECRET_FILE" not in settings.forwarded()  # meaningless on other machines
    monkeypatch.setenv("BYTEPS_AUTH", "0")
    assert settings.secret() == ""


def test_bad_usage_exits_with_2() -> None:
    command = [sys.executable, "-m", "megatron_byteps_ray", "train.py", "--ranks", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "ranks must be 1 or more, not 0" in run.stderr


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankActor:
    """Creates an actor that needs no Ray and imports very little."""
    facts = {"node": str(tmp_path), "address": "127.0.0.1", "host": "here", "pid": 1, "gpus": []}
    monkeypatch.setattr("megatron_byteps_ray.rank_actor.node_facts", lambda: facts)
    return RankActor(folder=str(tmp_path), preload=["json"], python_path=[], environment={})


def _order(folder: Path, text: str) -> dict:
    script = folder / "script.py"
    script.write_text(text)
    log = str(folder / "rank.log")
    return {
        "environment": {"A": "b", "RANK": "0"},
        "folder": str(folder),
        "log": log,
        "entry": str(script),
        "arguments": ["--x"],
    }


def _wait_gone(pid: int) -> None:
    """Wait until the process has ended. Only the test's own time limit applies."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)


def test_an_actor_runs_one_rank_after_the_other(actor: RankActor, tmp_path: Path) -> None:
    assert actor.warm(120.0) == ""
    for status in (0, 3):
        actor.start(
            _order(
                tmp_path, f"import os, sys; print(os.environ['A'], sys.argv[1])\nsys.exit({status})"
            )
        )
        end = actor.wait_end()
        assert end["status"] == status
        assert end["lines"][-1] == "b --x"


def test_steps_are_reported_in_order(actor: RankActor, tmp_path: Path) -> None:
    assert actor.warm(120.0) == ""
    text = "from megatron_byteps_ray import report\nfor n in (1, 2, 3): report(n, loss=1 / n)\n"
    actor.start(_order(tmp_path, text))
    assert actor.wait_end()["status"] == 0
    steps = actor.progress()["steps"]
    assert [(step["step"], step["values"]["loss"]) for step in steps] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
    ]


def test_an_error_ends_a_rank_with_its_text(actor: RankActor, tmp_path: Path) -> None:
    assert actor.warm(120.0) == ""
    actor.start(_order(tmp_path, "raise ValueError('no such thing')"))
    end = actor.wait_end()
    assert (end["status"], end["lines"][-1]) == (1, "ValueError: no such thing")


def test_a_rank_s_descriptors_stay_open_to_its_end(actor: RankActor, tmp_path: Path) -> None:
    """Descriptors are not closed a second time if they have the numbers of the fork server's
    descriptors."""
    assert actor.warm(120.0) == ""
    text = """
import os, sys
pairs = [os.pipe() for _ in range(20)]
class Last:
    def __del__(self, pairs=pairs, fstat=os.fstat, write=os.write):
        for number in [number for pair in pairs for number in pair]:
            try:
                fstat(number)
            except OSError:
                write(1, b"closed\\n")
        write(1, b"looked\\n")
sys.last_of_all = Last()
"""
    actor.start(_order(tmp_path, text))
    end = actor.wait_end()
    assert (end["status"], end["lines"]) == (0, ["looked"])


def test_a_rank_ends_with_what_it_started(actor: RankActor, tmp_path: Path) -> None:
    assert actor.warm(120.0) == ""
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\nopen('there', 'w').close()\ntime.sleep(600)\n"
    )
    actor.start(_order(tmp_path, text))
    while not (tmp_path / "there").exists():
        assert actor.progress()["running"]
    actor.stop()
    end = actor.wait_end()
    assert end["status"] == -9
    _wait_gone(int(end["lines"][-1]))


def test_a_rank_ends_with_its_actor(actor: RankActor, tmp_path: Path) -> None:
    assert actor.warm(120.0) == ""
    actor.start(_order(tmp_path, "open('there', 'w').close()\nimport time; time.sleep(600)\n"))
    while not (tmp_path / "there").exists():
        assert actor.progress()["running"]
    pid = actor.progress()["pid"]
    actor._connection.shutdown(2)  # the kernel does this when the actor is killed
    _wait_gone(pid)


SLOW = """
import os, time
with open(f"{os.path.dirname(__file__)}/{os.getpid()}.here", "w") as file:
    file.write(str(os.getppid()))
while not os.path.exists(f"{os.path.dirname(__file__)}/go"):
    time.sleep(0.01)
"""


def test_a_machine_outlives_an_actor_that_is_lost_during_the_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message of a standby is lost. This does not end the fork server."""
    (tmp_path / "slow.py").write_text(SLOW)
    # With a GPU, each standby does its own imports.
    facts = {"node": str(tmp_path), "address": "127.0.0.1", "host": "here", "pid": 1, "gpus": ["0"]}
    monkeypatch.setattr("megatron_byteps_ray.rank_actor.node_facts", lambda: facts)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own: dict[str, Any] = {"preload": ["slow"], "python_path": [str(tmp_path)], "environment": {}}
    lost, other = (RankActor(folder=str(tmp_path), **own) for _ in range(2))
    while len(here_files := list(tmp_path.glob("*.here"))) < 2 or not here_files[0].read_text():
        time.sleep(0.01)
    server = int(here_files[0].read_text())
    os.kill(server, signal.SIGSTOP)
    while psutil.Process(server).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    lost._connection.shutdown(2)
    (tmp_path / "go").touch()
    time.sleep(1.0)  # time for the standby to report
    os.kill(server, signal.SIGCONT)
    assert other.warm(120.0) == ""
    other.start(_order(tmp_path, "print('alive')"))
    assert other.wait_end()["lines"][-1] == "alive"


def test_a_module_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"node": str(tmp_path), "address": "127.0.0.1", "host": "here", "pid": 1, "gpus": []}
    monkeypatch.setattr("megatron_byteps_ray.rank_actor.node_facts", lambda: facts)
    actor = RankActor(folder=str(tmp_path), preload=["nosuch"], python_path=[], environment={})
    assert "No module named 'nosuch'" in actor.warm(120.0)


@pytest.mark.parametrize(
    ("given", "mask", "numbers"),
    [
        (["3"], None, [3]),
        (["4"], "4,5", [0]),
        (["5"], "4, 5", [1]),
        (["GPU-b"], "GPU-a,GPU-b", [1]),
        (["MIG-2"], "MIG-1,MIG-2", [1]),
        ([], "", []),
    ],
)
def test_gpus_as_ray_names_them(given: list[str], mask: str | None, numbers: list[int]) -> None:
    assert gpu_numbers(given, mask) == numbers


def test_a_gpu_that_ranks_do_not_see_is_named() -> None:
    with pytest.raises(ValueError, match=r"GPU 0, but ranks see CUDA_VISIBLE_DEVICES=4,5: set it"):
        gpu_numbers(["0"], "4,5")


def _place(node: str, gpus: list[int], *, of_slice: bool = False) -> dict:
    return {"node": node, "gpus": gpus, "slice": of_slice, "address": f"10.0.0.{node}"}


def _variables(places: list[dict], name: str) -> list[str | None]:
    return [local_variables(places, rank).get(name) for rank in range(len(places))]


def test_local_ranks_number_gpus_and_ranks() -> None:
    # The GPU between them belongs to another job or to a spare.
    places = [_place("1", [0]), _place("1", [2]), _place("2", [1])]
    assert _variables(places, "LOCAL_RANK") == ["0", "2", "1"]
    assert _variables(places, "LOCAL_WORLD_SIZE") == ["3", "3", "2"]
    assert _variables(places, "BYTEPS_LOCAL_RANK") == ["0", "1", "0"]
    assert _variables(places, "BYTEPS_LOCAL_SIZE") == ["2", "2", "1"]
    assert _variables(places, "NCCL_HOSTID") == [None] * 3
    without = [_place("1", []), _place("2", []), _place("1", [])]
    assert _variables(without, "LOCAL_RANK") == ["0", "0", "1"]
    assert _variables(without, "LOCAL_WORLD_SIZE") == ["2", "1", "2"]


def test_ranks_that_share_a_gpu_are_on_several_machines_to_nccl() -> None:
    places = [_place("1", [0]), _place("1", [0]), _place("1", [1]), _place("2", [0])]
    assert _variables(places, "LOCAL_RANK") == ["0", "0", "1", "0"]
    assert _variables(places, "NCCL_HOSTID") == ["1-0", "1-1", "1-0", None]
    assert _variables(places, "BYTEPS_LOCAL_RANK") == ["0", "1", "2", "0"]
    slices = [_place("1", [n], of_slice=True) for n in range(3)]
    assert _variables(slices, "NCCL_HOSTID") == ["1-0", "1-1", "1-2"]


def test_a_port_that_is_bound_later_is_none_that_the_kernel_gives() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    kernels = range(int(given[0]), int(given[1]) + 1)
    ports = [settings.free_port() for _ in range(20)]
    assert not any(port in kernels or port in range(10_002, 20_000) for port in ports)


def test_each_process_of_a_machine_has_its_own_port(tmp_path: Path) -> None:
    environment = {"BYTEPS_METRICS_PORT": "9400"}
    servers = [settings.metrics_of_server(environment, n)["BYTEPS_METRICS_PORT"] for n in range(2)]
    ranks = int(settings.metrics_of_ranks(environment, 2)["BYTEPS_METRICS_PORT"])
    assert (servers, ranks) == (["9400", "9401"], 9402)
    assert settings.metrics_of_ranks({}, 2) == {}
    with pytest.raises(ValueError, match="BYTEPS_METRICS_PORT=http is no port"):
        Settings(entry="train.py", environment={"BYTEPS_METRICS_PORT": "http"})
    places = [_place("1", []), _place("2", []), _place("2", [])]
    settings.write_metrics_list(tmp_path, ranks, ["10.0.0.1:9400", "10.0.0.2:9401"], places)
    targets = json.loads((tmp_path / "prometheus.json").read_text())
    assert [target["targets"][0] for target in targets] == [
        *("10.0.0.1:9400", "10.0.0.2:9401", "10.0.0.1:9402", "10.0.0.2:9402", "10.0.0.2:9403")
    ]
    assert targets[1]["labels"] == {"job": tmp_path.name, "server": "1"}
    assert targets[4]["labels"] == {"job": tmp_path.name, "worker": "2"}


# Ranks with GPUs, on a node that claims to have some: Ray itself needs no GPU.


GPU_SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "BYTEPS_LOCAL_RANK")
names += ("NCCL_HOSTID",)
seen = {n: os.environ.get(n) for n in names}
# The parent is the fork server. It has imported torch, and not what may ask for GPUs.
seen["imported here"] = sys.modules["counting"].PID == os.getpid()
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""


@pytest.mark.parametrize(
    ("mask", "share", "local_ranks", "machines"),
    [
        ("4,5", 1.0, ["0", "1"], 0),
        ("GPU-5f3a,GPU-77b0", 1.0, ["0", "1"], 0),
        ("MIG-5f3a,MIG-77b0", 1.0, ["0", "1"], 2),
        ("6", 0.5, ["0", "0"], 2),
    ],
    ids=["numbers", "names", "slices", "shared"],
)
def test_each_rank_has_a_gpu_and_imports_after_the_fork(
    mask: str, share: float, local_ranks: list[str], machines: int, pool: Pool, run_dir: Path
) -> None:
    del pool  # its cluster gets another node
    (run_dir / "script.py").write_text(GPU_SCRIPT)
    (run_dir / "counting.py").write_text("import os\nPID = os.getpid()\n")
    settings = Settings(
        entry=str(run_dir / "script.py"),
        arguments=(str(run_dir),),
        servers=0,
        cpus_per_rank=0.5,
        gpus_per_rank=share,
        folder=run_dir / "job",
        environment={n: v for n, v in ENVIRONMENT.items() if n != "CUDA_VISIBLE_DEVICES"},
        python_path=(str(run_dir),),
        preload=("torch", "counting"),
    )
    nodes = Nodes(run_dir / "nodes")
    gpus = mask.count(",") + 1
    try:
        nodes.add(cpus=1, gpus=gpus, mask=mask)
        Job(settings, lambda event: None).run()
    finally:
        nodes.close()
    seen = [json.loads((run_dir / f"{rank}.json").read_text()) for rank in range(2)]
    assert [environment["RANK"] for environment in seen] == ["0", "1"]
    # GPUs are numbered like CUDA does in a process that sees all GPUs that Ray may assign.
    assert sorted(environment["LOCAL_RANK"] for environment in seen) == local_ranks
    assert {environment["LOCAL_WORLD_SIZE"] for environment in seen} == {str(gpus)}
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in seen} == {mask}
    assert [environment["BYTEPS_LOCAL_RANK"] for environment in seen] == ["0", "1"]
    assert len({environment["NCCL_HOSTID"] for environment in seen} - {None}) == machines
    assert all(environment["imported here"] for environment in seen)


@pytest.mark.parametrize(
    ("gpus", "number", "of", "expected"),
    [
        (4, 3, 4, {"LOCAL_RANK": "3"}),
        (1, 0, 1, {"LOCAL_RANK": "0"}),
        (1, 2, 4, {"LOCAL_RANK": "0", "NCCL_HOSTID": "machine2"}),
        (2, 1, 3, {"LOCAL_RANK": "1", "NCCL_HOSTID": "machine0"}),
        (2, 2, 3, {"LOCAL_RANK": "0", "NCCL_HOSTID": "machine1"}),
    ],
)
def test_ranks_share_gpus_where_there_are_too_few(
    gpus: int, number: int, of: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    monkeypatch.setenv("MEGATRON_CPU", "0")
    monkeypatch.setenv("LOCAL_RANK", str(number))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    take_a_share()
    names = ("LOCAL_RANK", "NCCL_HOSTID")
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def test_a_cluster_offers_gpus_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = Settings(entry="train.py", ranks=2, spares=1)
    assert gpus_to_offer(settings) is None
    assert gpus_to_offer(replace(settings, gpus_per_rank=1.0)) == 3
    assert gpus_to_offer(replace(settings, gpus_per_rank=1.0, spares=0)) is None
