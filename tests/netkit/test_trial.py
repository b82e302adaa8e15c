"""A trial of a launch line on two emulated hosts, with the same command on each."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.kit.emulation import Emulation
from bench.kit.plan import Topology
from scripts.children import captured, free_ports
from scripts.train import MODEL
from tests.multiproc.cluster import (
    LOOPBACK,
    RUN_S,
    Spawned,
    clean_environment,
    processes_with,
)

pytestmark = pytest.mark.requires("root")

INT8 = "BytePS with gradients in int8"
MARK = "TRIAL_TEST_MARK"
TREE = Path(__file__).parents[2] / "build/Megatron-LM"
GPT = (
    *(str(TREE / "pretrain_dpu_gpt.py"), *MODEL, "--num-layers", "2", "--hidden-size", "256"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"),
    *("--num-workers", "0", "--train-iters", "1000", "--save-interval", "1"),
    *("--bf16", "--grad-reduce-in-bf16"),
)
DDP = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(500, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(4, 500)).square().mean().backward()
    optimizer.step()
"""


def _try(run_dir: Path, *arguments: str, command: Sequence[str]) -> list[tuple[int, str]]:
    """Run a trial, and get the exit status and output of each host's command; no process is
    left."""
    topology = Topology(workers=1, servers=1, emulated_hosts=2, link_bits=100_000_000)
    with Emulation(topology) as emulation:
        trials = []
        for index, host in enumerate(emulation.hosts):
            env = {
                **clean_environment(run_dir),
                MARK: str(run_dir),
                "GLOO_SOCKET_IFNAME": "eth0",
                "BYTEPS_START_TIMEOUT_S": "150",
                "MEGATRON_CPU": "1",
                "PYTHONPATH": str(TREE),
                "PYTHONWARNINGS": "ignore",
                "RANK": str(index),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_PORT": "29500",
                "MASTER_ADDR": emulation.hosts[0].address,
            }
            del env["BYTEPS_SECRET"]
            places = {"index": index, "master": emulation.hosts[0].address}
            words = [word.format(**places) for word in command]
            started = [sys.executable, "-m", "byteps.trial", *arguments, "--", *words]
            named = ["unshare", "--uts", "sh", "-ec", 'hostname "$0"; exec "$@"', f"host-{index}"]
            trials.append(Spawned(f"host {index}", host.command([*named, *started]), env, run_dir))
        try:
            return [(trial.wait(RUN_S), trial.text) for trial in trials]
        finally:
            for trial in trials:
                trial.kill()
            assert not processes_with(MARK, str(run_dir))


@pytest.mark.slow
def test_plain_script(run_dir: Path, warm_python: str) -> None:
    """A plain script needs no change, and both hosts print the same."""
    script = run_dir / "train.py"
    script.write_text(DDP)
    answers = _try(
        run_dir, "--steps", "3", "--skip", "2", command=[warm_python, str(script), "1000"]
    )
    for status, text in answers:
        assert status == 0, text
        assert "2 ranks on 2 hosts, 2 launches of each, 3 steps after 2:" in text
        kinds = re.findall(r"^  (plain|BytePS): [0-9.]+ ms per step, loss ([0-9.]+)$", text, re.M)
        assert [kind for kind, _ in kinds] == ["plain", "BytePS"] * 2
        assert all(abs(float(loss) / float(kinds[0][1]) - 1) < 0.05 for _, loss in kinds)
        assert re.search(
            rf"^Answer: keep ({INT8} \(BYTEPS_C10D=1 BYTEPS_C10D_WIRE_DTYPE=int8\): \d+\.\d\d x as "
            rf"fast as gloo\. The losses differ by|gloo: {INT8} is \d+\.\d\d x)",
            text,
            re.M,
        ), text
    assert re.findall("Answer.*", answers[0][1]) == re.findall("Answer.*", answers[1][1])


@pytest.mark.thorough
def test_megatron_by_torchrun(run_dir: Path) -> None:
    """Megatron gets the preset, saves no checkpoint, and reports its own loss."""
    checkpoints = run_dir / "checkpoints"
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", "{index}", "--master-addr", "{master}", "--master-port", "29500"),
    ]
    answers = _try(
        *(run_dir, "--steps", "3", "--skip", "2"),
        command=[*torchrun, *GPT, "--save", str(checkpoints)],
    )
    for status, text in answers:
        assert status == 0, text
        losses = re.findall(
            r"^  (?:plain|BytePS): [0-9.]+ ms per step, loss ([0-9.]+)$", text, re.M
        )
        assert len(losses) == 4 and losses[0] == losses[2], text
        assert re.search(
            rf"^Answer: keep ({INT8} \(--dpu-preset own-hosts\)|gloo): .*\d+\.\d\d x",
            text,
            re.M,
        ), text
        assert "try it with --use-distributed-optimizer --overlap-grad-reduce --overlap-" in text
    assert not list(checkpoints.glob("iter*"))


@pytest.mark.thorough
def test_one_command_starts_the_ranks_of_all_hosts(run_dir: Path) -> None:
    """The command runs like srun on a host that may have no rank."""
    script, launcher = run_dir / "train.py", run_dir / "launch.sh"
    script.write_text(DDP)
    launcher.write_text(
        f"RANK=1 BYTEPS_HOST_ID=b {sys.executable} {script} 1000 &\n"
        f"RANK=0 BYTEPS_HOST_ID=a {sys.executable} {script} 1000\nwait\n"
    )
    env = {
        **clean_environment(run_dir),
        "BYTEPS_START_TIMEOUT_S": "150",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_ports()),
    }
    trial = [sys.executable, "-m", "byteps.trial", "--steps", "2", "--skip", "2"]
    ended = captured([*trial, "--", "sh", "-e", launcher], RUN_S, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks on 2 hosts, 2 launches of each" in ended.stdout
