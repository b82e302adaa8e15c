"""Runs a user's script by torchrun on emulated hosts, with gloo alone and through servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.children import Spawned
from scripts.ports import free_ports
from tests.multiproc.cluster import Cluster, clean_environment, wait_all

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 1500.0
"""Against hangs: ranks import much, and DeepSpeed compiles something on a new machine."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What rank 0 of a job wrote."""

    before: list[torch.Tensor]
    """Parameters, before the first step."""
    after: list[torch.Tensor]
    steps: int
    text: str
    """What all ranks printed."""

    @property
    def nbytes(self) -> int:
        """Of the gradients of a step, in fp32."""
        return sum(each.numel() * 4 for each in self.before)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of `programs`, with its arguments, on so many hosts."""

    name: str
    arguments: Sequence[str] = ()
    hosts: int = 2
    ranks_per_host: int = 2

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def run(self, folder: Path, env: Mapping[str, str]) -> Learned:
        """One torchrun per host, in this environment; demands that all end with 0."""
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
        """As a user runs it who has not heard of BytePS."""
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
        """The same script with ``BYTEPS_C10D=1``; also the bytes that the servers reduced."""
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
    """Bytes of the sums in the servers' timelines; each partition and round counts once."""
    paths = sorted(timelines.glob("byteps-server-*.json"))
    assert len(paths) == servers, paths
    sums: dict[tuple[str, int, int], int] = {}
    for path in paths:
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            row = event.get("args", {})
            if event["ph"] == "b" and "tensor" in row:
                sums[row["tensor"], row["partition"], row["round"]] = row["bytes"]
    return sum(sums.values())
