"""Frameworks without BytePS code train equally through servers and with gloo.

torchrun runs a user's script on emulated hosts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from scripts.children import Spawned, free_ports
from tests.multiproc.cluster import Cluster, clean_environment, wait_all

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 1500.0
"""Limit in seconds against hangs: imports are slow, and DeepSpeed compiles code on a new
machine."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Results that rank 0 of a job wrote."""

    before: list[torch.Tensor]
    """Parameters before the first step."""
    after: list[torch.Tensor]
    steps: int
    text: str
    """Output of all ranks."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients of a step, in fp32."""
        return sum(each.numel() * 4 for each in self.before)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of `programs`, with arguments and number of hosts."""

    name: str
    arguments: Sequence[str] = ()
    hosts: int = 2
    ranks_per_host: int = 2

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def run(self, folder: Path, env: Mapping[str, str]) -> Learned:
        """Run a torchrun per host in this environment, and check that all end with status 0."""
        out = folder / "learned.pt"
        port = str(free_ports())
        words = ["-m", "torch.distributed.run", "--nnodes", str(self.hosts)]
        words += ["--nproc-per-node", str(self.ranks_per_host)]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
        script = [str(PROGRAMS / self.name), *self.arguments, str(out)]
        launchers = [
            Spawned(
                f"host {host}",
                [sys.executable, "-W", "ignore", *words, str(host), *script],
                {**env, "BYTEPS_HOST_ID": f"host-{host}"},
                folder,
            )
            for host in range(self.hosts)
        ]
        try:
            wait_all(launchers, LIMIT_S)
            text = "".join(launcher.text for launcher in launchers)
            assert [launcher.status for launcher in launchers] == [0] * self.hosts, text
        finally:
            for launcher in launchers:
                launcher.kill()
        written = torch.load(out, weights_only=True)
        return Learned(**written, text=text)

    def natively(self, folder: Path) -> Learned:
        """Run the script without BytePS."""
        folder.mkdir()
        env = {
            name: value
            for name, value in clean_environment(folder).items()
            if not name.startswith("BYTEPS_")
        }
        return self.run(folder, {**env, "GLOO_SOCKET_IFNAME": "lo"})

    def through_servers(
        self, folder: Path, env: Mapping[str, str], servers: int
    ) -> tuple[Learned, int]:
        """Run the script with ``BYTEPS_C10D=1``; also get the bytes that the servers reduced."""
        timelines = folder / "timelines"
        more = {
            "BYTEPS_C10D": "1",
            "BYTEPS_START_TIMEOUT_S": "1000",
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_DIR": str(timelines),
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
        }
        with _cluster(folder, self.ranks, servers, more) as cluster:
            learned = self.run(folder, cluster.node_environment())
            wait_all(cluster.servers, LIMIT_S)
        return learned, _reduced(timelines, servers)


@contextmanager
def _cluster(folder: Path, workers: int, servers: int, env: Mapping[str, str]) -> Iterator[Cluster]:
    with Cluster(folder, None, workers=workers, servers=servers, env=env) as cluster:
        cluster.start_nodes()
        yield cluster


def _reduced(timelines: Path, servers: int) -> int:
    """Count the bytes of sums in the servers' timelines; each partition and round counts once."""
    paths = sorted(timelines.glob("byteps-server-*.json"))
    assert len(paths) == servers, paths
    sums: dict[tuple[str, int, int], int] = {}
    for path in paths:
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            row = event.get("args", {})
            if event["ph"] == "b" and "tensor" in row:
                sums[row["tensor"], row["partition"], row["round"]] = row["bytes"]
    return sum(sums.values())


FLAT = {"BYTEPS_C10D_BACKEND": "flat"}
NODE_FIRST = {"BYTEPS_C10D_BACKEND": "node-first"}
CLOSE = 2.0**-16
"""Tolerance, relative to the largest update of a tensor.

A sum of four fp32 values is rounded at most three times in any order. Gradients differ by 2**-22 of
their size, and by more after cancellation; four steps increase this little. A missing or old
gradient makes a difference of order 1.
"""
ROUNDED = 2.0**-23
"""Tolerance per step, relative to the largest parameter: the update is rounded when added."""
MOST = 0.9
"""Expected part of the gradients' bytes: tensors below 64 KiB stay with gloo."""

ROWS = {
    # Four values are added in another order than gloo's.
    "lightning-ddp": (Script(name="plain_lightning.py", arguments=["ddp"]), NODE_FIRST, 1, False),
    "lightning-ddp-4-hosts": (
        Script(name="plain_lightning.py", arguments=["ddp"], hosts=4, ranks_per_host=1),
        {},  # four servers: BytePS decides by itself that they are faster
        4,
        False,
    ),
    "transformers-trainer": (Script(name="plain_trainer.py", arguments=["ddp"]), FLAT, 2, False),
    "deepspeed-zero-1": (Script(name="plain_deepspeed.py", arguments=["1"]), FLAT, 2, False),
    "deepspeed-zero-2": (Script(name="plain_deepspeed.py", arguments=["2"]), NODE_FIRST, 1, False),
    # Each sum between hosts has two values.
    "lightning-hsdp": (Script(name="plain_lightning.py", arguments=["hsdp"]), FLAT, 2, True),
    "torchtitan-hsdp": (Script(name="plain_torchtitan.py", arguments=["hsdp"]), FLAT, 2, True),
    "torchtitan-ddp": (
        Script(name="plain_torchtitan.py", arguments=["ddp"], ranks_per_host=1),
        FLAT,
        1,
        True,
    ),
}
"""Script, settings, servers, and whether all bits must be equal."""


SHARDED = {
    name: Script(name=f"plain_{name}.py", arguments=["fsdp"], ranks_per_host=1)
    for name in ("torchtitan", "trainer")
}
"""Scripts with FSDP2 over two hosts: each sum has two values."""
FEW_BITS = "int8,int8"
NEAR = 0.2
"""Tolerance of an update in few bits, as a fraction of its length: blocks round gradients and
parameters by at most 1/254 of a block's largest value."""


def demand_same(ours: Learned, theirs: Learned, *, bits: bool) -> None:
    """Check that both trained, with the same result."""
    assert len(ours.after) == len(theirs.after) > 0
    for number, before in enumerate(theirs.before):
        assert torch.equal(ours.before[number], before), "another model"
        our_parameter, other = ours.after[number], theirs.after[number]
        update = (other - before).abs().max()
        assert update > 0, f"parameter {number} did not learn"
        difference = (our_parameter - other).abs().max()
        if bits:
            assert torch.equal(our_parameter, other), (
                f"parameter {number}: {difference} of {update}"
            )
        close = CLOSE * update + ours.steps * ROUNDED * other.abs().max()
        assert difference <= close, f"parameter {number}: {difference} of {update}"


@pytest.mark.timeout(2 * LIMIT_S + 100)
@pytest.mark.parametrize("row", ROWS)
def test_frameworks_learn_the_same(run_dir: Path, row: str) -> None:
    script, env, servers, bits = ROWS[row]
    theirs = script.natively(run_dir / "gloo")
    ours, reduced = script.through_servers(run_dir / "servers", env, servers)
    assert "BytePS" not in theirs.text
    assert f"over {script.ranks} ranks on {script.hosts} host(s): BytePS" in ours.text or (
        "over 2 ranks on 2 host(s): BytePS flat" in ours.text
    ), ours.text
    assert reduced >= MOST * ours.steps * ours.nbytes, f"{reduced} bytes of {ours.nbytes} a step"
    demand_same(ours, theirs, bits=bits)


@pytest.mark.timeout(4 * LIMIT_S + 100)
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_frameworks_learn_the_same(run_dir: Path, name: str) -> None:
    script = SHARDED[name]
    theirs = script.natively(run_dir / "gloo")
    for dtypes, nbytes in (("none", 0.0), ("same", 4.0), (FEW_BITS, 130 / 128)):
        env = {**FLAT, "BYTEPS_FSDP_DTYPES": dtypes}
        ours, reduced = script.through_servers(run_dir / dtypes, env, 1)
        is_told = "reduce-scatters of float32" in ours.text
        assert is_told == (reduced > 0) == (nbytes > 0), f"{reduced} bytes\n{ours.text}"
        assert reduced >= MOST * ours.steps * ours.nbytes * nbytes / 4, f"{reduced} bytes"
        if dtypes == FEW_BITS:
            demand_near(ours, theirs)
        else:
            demand_same(ours, theirs, bits=True)


def demand_near(ours: Learned, theirs: Learned) -> None:
    """Check that both have made nearly the same update, and not the same one."""
    before, own, other = (
        torch.cat([each.flatten() for each in values])
        for values in (theirs.before, ours.after, theirs.after)
    )
    distance = float((own - other).norm() / (other - before).norm())
    assert 0 < distance < NEAR, distance
