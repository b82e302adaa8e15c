"""Jobs with no machine but the training hosts, started by a command on each: servers start there by
default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.kit.emulation import Emulation
from bench.kit.plan import Topology
from tests.multiproc.cluster import (
    HERE,
    RUN_S,
    Nursery,
    Spawned,
    clean_environment,
    processes_with,
    wait_all,
)
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
def test_uneven_hosts(run_dir: Path, warm_python: str, addresses: tuple[str, ...]) -> None:
    """The job of the README, with different numbers of ranks per host, and with other host
    names."""
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
                # Emulated links are not hardware links, and by default only one of them is used.
                "BYTEPS_NICS": ",".join(host.interfaces),
                # The tensor has enough partitions that all NICs carry some, whatever their speeds.
                "ELEMENTS": str(2 << 20),
            }
            del env["BYTEPS_SECRET"]
            torchrun = [
                *(warm_python, "-m", "torch.distributed.run", "--nnodes", "2"),
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


MASTER = "host-0"
"""Name of the first host; its own hosts file maps the name to 127.0.1.1, like Debian's."""
AT_MASTER = {"MASTER_ADDR": MASTER, "MASTER_PORT": "29500"}
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A way to start the ranks of two hosts so that they find each other."""

    name: str
    torchrun: tuple[str, ...] = ()
    """Arguments of torchrun; empty: ranks are started one by one."""
    init_method: str = ""
    """The `init_method` of `init_process_group`; empty: not given."""
    given: tuple[str, ...] = ()
    """Variables that are set for each rank."""
    env: Mapping[str, str] = field(default_factory=dict)
    master_env: Mapping[str, str] = field(default_factory=dict)
    """Variables on the first host only."""
    own_name: str = "127.0.1.1"
    """Address that a host's own name has on that host; empty: the same as on other hosts."""
    victim: int | None = None
    """Rank that is killed once; all ranks restart after that."""
    servers: int = 2
    quick: bool = False


C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{MASTER}:29400", "--rdzv-id", "1",
        "--nnodes", "2", "--max-restarts", "2")  # fmt: skip
FRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LAUNCHERS = (
    Launcher(name="c10d", torchrun=C10D, env=FRESH, victim=0, quick=True),
    Launcher(name="c10d-other-host", torchrun=C10D, env=FRESH, victim=2),
    Launcher(
        name="master-addr",
        torchrun=("--nnodes", "2", "--master-addr", MASTER, "--master-port", "29500"),
    ),
    # Pods of a PyTorchJob: the master's own name is localhost. Its NIC is the slower of the two.
    Launcher(
        name="kubernetes",
        given=PLACES[:2],
        env={**AT_MASTER, "BYTEPS_LINK_GBPS": "1"},
        master_env={"MASTER_ADDR": "localhost", "BYTEPS_LINK_GBPS": "0.5"},
        servers=3,
        quick=True,
    ),
    # Under srun the script reads ranks and local ranks from SLURM_PROCID and SLURM_LOCALID.
    Launcher(name="slurm", init_method="env://", given=PLACES[:3], env=AT_MASTER),
    # Each rank finds itself alone on its host.
    Launcher(
        name="ray",
        init_method="env://",
        given=PLACES[:2],
        env={**AT_MASTER, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ),
    Launcher(name="spawn-tcp", init_method=f"tcp://{MASTER}:29500"),
    Launcher(name="spawn-file", init_method="file://{folder}/store", own_name="", quick=True),
)


def host_words(launcher: Launcher, index: int, address: str) -> list[str]:
    """Make torchrun's arguments on this host."""
    words = [*launcher.torchrun, "--nproc-per-node", str(RANKS[index])]
    if launcher.name == "master-addr":
        return [*words, "--node-rank", str(index)]
    return [*words, "--local-addr", address, "--rdzv-conf", f"is_host={int(index == 0)}"]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(row, id=row.name, marks=() if row.quick else pytest.mark.thorough)
        for row in LAUNCHERS
    ],
)
def test_every_launcher(run_dir: Path, nursery: Nursery, launcher: Launcher) -> None:
    """Two hosts without a default route, under every launcher: a restart begins with new
    servers."""
    lives = 1 if launcher.victim is None else 2
    topology = Topology(workers=1, servers=1, emulated_hosts=2, link_bits=400_000_000)
    ranks = []
    with Emulation(topology) as emulation:
        addresses = [host.address for host in emulation.hosts]
        for index, host in enumerate(emulation.hosts):
            own = {index: launcher.own_name} if launcher.own_name else {}
            known = {**dict(enumerate(addresses)), **own}
            names = run_dir / f"hosts.{index}"
            lines = ["127.0.0.1 localhost", *(f"{known[i]} host-{i}" for i in known)]
            names.write_text("\n".join(lines) + "\n")
            env = {
                **clean_environment(run_dir),
                "JOB_FOLDER": str(run_dir),
                "GLOO_SOCKET_IFNAME": "eth0",
                "LIVES": str(lives),
                "VICTIM": str(launcher.victim),
                **launcher.env,
                **(launcher.master_env if index == 0 else {}),
            }
            del env["BYTEPS_SECRET"]
            args: dict[str, Any] = {
                "namespace": host.namespace,
                "name": f"host-{index}",
                "names": str(names),
            }
            if launcher.torchrun:
                args["torchrun"] = host_words(launcher, index, host.address)
            else:
                method = launcher.init_method.format(folder=run_dir)
                args |= {"ranks": RANKS[index], "first": sum(RANKS[:index]), "size": sum(RANKS)}
                args |= {"given": launcher.given, "init_method": method}
            ranks.append(nursery.start(f"host {index}", "own_hosts:host", env, run_dir, args))
        try:
            wait_all(ranks, RUN_S)
        finally:
            for started in ranks:
                started.kill()
    text = "".join(started.text for started in ranks)
    assert [started.status for started in ranks] == [0, 0], text[-5000:]
    for life in range(lives):
        for rank in range(3):
            assert f"life {life}: rank {rank} of 3, {launcher.servers} servers" in text
    where = rf"started the scheduler at {re.escape(addresses[0])}:\d+"
    count = rf"{launcher.servers} in all on 2 host\(s\)"
    assert len(re.findall(f"{where}.* {count}", text)) == lives, text
    assert "same store" not in text, "a warning of what would fail"
    assert not processes_with("JOB_FOLDER", str(run_dir))
