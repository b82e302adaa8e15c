"""A job with no machine but its hosts, from one command on each: servers start there by default."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bench.kit.emulation import Emulation
from bench.kit.plan import Topology
from tests.multiproc.cluster import HERE, RUN_S, Spawned, clean_environment, processes_with
from tests.netkit.test_names import remove_ipv4

pytestmark = pytest.mark.requires("root")

RANKS = (2, 1)
"""Number of ranks by host."""
MARK = "OWN_HOSTS_TEST_MARK"


@pytest.mark.parametrize(
    "addresses",
    [
        pytest.param((), id="two-nics"),
        pytest.param(("fd00::1", "fd00::2"), id="ipv6", marks=pytest.mark.thorough),
    ],
)
def test_uneven_hosts(run_dir: Path, addresses: tuple[str, ...]) -> None:
    """The job of the README, with another number of ranks on each host, and names of their own."""
    topology = Topology(
        workers=1,
        servers=1,
        emulated_hosts=2,
        link_bits=400_000_000,
        nics_per_host=1 if addresses else 2,
    )
    with Emulation(topology) as emulation:
        for host, address in zip(emulation.hosts, addresses, strict=False):
            remove_ipv4(host, address)
        master = addresses[0] if addresses else emulation.hosts[0].address
        launchers = []
        for index, host in enumerate(emulation.hosts):
            env = {
                **clean_environment(run_dir),
                MARK: str(run_dir),
                "JOB_FOLDER": str(run_dir),
                "GLOO_SOCKET_IFNAME": "eth0",
                # Emulated links are no hardware, of which one takes all.
                "BYTEPS_NICS": ",".join(host.interfaces),
                # Partitions enough that all NICs have some, however fast each sends.
                "ELEMENTS": str(2 << 20),
            }
            del env["BYTEPS_SECRET"]
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(index), "--nproc-per-node", str(RANKS[index])),
                *("--master-addr", master, "--master-port", "29500"),
                *(str(HERE / "programs/keep.py"), "embedded", "once"),
            ]
            named = ["unshare", "--uts", "sh", "-ec", 'hostname "$0"; exec "$@"', f"host-{index}"]
            launchers.append(
                Spawned(f"host {index}", host.command([*named, *torchrun]), env, run_dir)
            )
        try:
            for launcher in launchers:
                assert launcher.wait(RUN_S) == 0, launcher.text
        finally:
            for launcher in launchers:
                launcher.kill()
        sent = [emulation.sent_bytes(index) for index in range(2)]
    text = "".join(launcher.text for launcher in launchers)
    for rank in range(3):
        assert f"rank {rank} of 3, 2 servers, sums are right" in text
    where = re.escape(f"[{master}]" if addresses else master)
    assert re.search(rf"started the scheduler at {where}:\d+.* 2 in all on 2 host\(s\)", text)
    for rails in sent:
        assert min(rails) > 0.1 * max(rails), f"a NIC carried nothing: {sent}"
    assert not processes_with(MARK, str(run_dir))
