"""scripts/examples/slurm.sbatch in a real Slurm cluster of the test: each node is an emulated host,
and files are in the test's folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from scripts.children import Spawned, captured, last_lines
from tests.multiproc.cluster import HERE, REPOSITORY, START_S

LINK_BITS = 1_000_000_000
CONTROLLER = "controller"


class SlurmCluster:
    """Nodes n0, n1, ... and a controller, each on its own emulated host, as a context manager.

    Each node has a PID namespace, and its processes end with it.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.names = [f"n{index}" for index in range(nodes)]
        self._emulation = Emulation(
            Topology(workers=nodes, servers=1, emulated_hosts=nodes + 1, link_bits=LINK_BITS)
        )
        self._daemons: list[Spawned] = []

    @property
    def _hosts(self) -> dict[str, Host]:
        return dict(zip([*self.names, CONTROLLER], self._emulation.hosts, strict=True))

    @property
    def _env(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "BYTEPS_"))}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> SlurmCluster:
        self.folder.mkdir(mode=0o700)
        self._emulation.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
        self._emulation.down()

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command next to the controller."""
        return captured(
            self._hosts[CONTROLLER].command(command), timeout_s, env=self._env, cwd=REPOSITORY
        )

    def _start(self) -> None:
        folder = self.folder
        for name in ("state", *(f"spool.{name}" for name in self.names)):
            (folder / name).mkdir()
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{host.address} {name}\n" for name, host in self._hosts.items())
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._write_conf()
        files = {"socket": "munge", "key-file": "munge.key", "pid-file": "munge.pid",
                 "log-file": "munge.log", "seed-file": "munge.seed"}  # fmt: skip
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        # Without --force, munged demands that root owns all parent folders of its files.
        self._daemons.append(
            Spawned(
                "munged", [_find("munged"), "--foreground", "--force", *options], self._env, folder
            )
        )
        self._await("munge's socket", (folder / "munge").exists)
        self._spawn(CONTROLLER, "slurmctld", "-D", "-c")
        for name in self.names:
            self._spawn(name, "slurmd", "-D")
        self._await("idle nodes", self._all_idle)

    def _all_idle(self) -> bool:
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout
        return sorted(said.split("\n")) == sorted(["", *(f"{name} idle" for name in self.names)])

    def _spawn(self, name: str, program: str, *options: str) -> None:
        # Its own host name, mount table and PID namespace.
        enter = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        begin = f'hostname {name} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        command = [*enter, "sh", "-c", begin, "sh", _find(program), *options]
        on_host = self._hosts[name].command(command)
        self._daemons.append(Spawned(f"{program} {name}", on_host, self._env, self.folder))

    def _await(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not there():
            dead = [daemon for daemon in self._daemons if not daemon.running]
            if dead or time.monotonic() > deadline:
                tails = "\n".join(f"{d.title}:\n{last_lines(d.log)}" for d in dead or self._daemons)
                raise AssertionError(f"no {what}\n{tails}")
            time.sleep(0.1)

    def _write_conf(self) -> None:
        folder, hosts = self.folder, self._hosts
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={CONTROLLER}({hosts[CONTROLLER].address})",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"AuthInfo=socket={folder}/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            # The cluster has no control groups, accounts or MPI, because only processes matter
            # here.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "MpiDefault=none",
            "SchedulerType=sched/builtin",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            # This machine may have fewer cores than a node claims.
            "SlurmdParameters=config_overrides",
            "KillWait=5",
            *(
                f"NodeName={name} NodeAddr={hosts[name].address} NodeHostname={name} CPUs=2"
                for name in self.names
            ),
            "PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # slurmd looks for the cgroup version even if it uses no cgroups, and a host may have none.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _find(program: str) -> str:
    """Find a program. Debian's daemons are outside most users' PATH."""
    path_of = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    assert path_of is not None, f"{program} is not installed"
    return path_of


SCRIPT = REPOSITORY / "scripts/examples/slurm.sbatch"
JOB = (str(HERE / "programs/keep.py"), "scripted")
NODES = 4

pytestmark = [
    pytest.mark.requires("root", "slurm"),
    pytest.mark.thorough,
    pytest.mark.timeout(900),
]


@pytest.fixture
def slurm(run_dir: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(run_dir / "slurm", NODES) as cluster:
        yield cluster


def submit(slurm: SlurmCluster, folder: Path, *job: str, export: str = "") -> tuple[int, str]:
    """Submit a job; return its exit status and output."""
    output = folder / "job.log"
    ended = slurm.run(
        "sbatch", "--wait", f"--nodes={NODES}", f"--output={output}",
        f"--export=ALL{export}", str(SCRIPT), *job, timeout_s=600,
    )  # fmt: skip
    said = output.read_text(errors="replace") if output.exists() else ""
    return ended.returncode, f"{ended.stdout}{ended.stderr}\n{said}"


def ranks_of(said: str) -> dict[str, str]:
    """Return what each rank reports about its sums."""
    return dict(re.findall(r"rank (\d) of (\d): sums are right", said))


def test_every_node_trains_and_serves(slurm: SlurmCluster, run_dir: Path) -> None:
    export = f",JOB_FOLDER={run_dir},GLOO_SOCKET_IFNAME=eth0"
    status, said = submit(slurm, run_dir, JOB[0], "embedded", "once", export=export)
    assert status == 0, said
    for rank in range(4):
        assert f"rank {rank} of 4, 4 servers, sums are right" in said, said
    assert re.search(r"started the scheduler at 10\.77\.0\.1:\d+.* 4 in all on 4 host", said), said


def test_three_nodes_of_two_ranks_and_one_server(slurm: SlurmCluster, run_dir: Path) -> None:
    export = ",SERVER_NODES=1,GPUS_PER_NODE=2"
    status, said = submit(slurm, run_dir, *JOB, "once", str(run_dir), export=export)
    assert status == 0, said
    assert ranks_of(said) == {str(rank): "6" for rank in range(6)}, said
    # The scheduler and the workers are on the first nodes, the server on the last.
    assert "10.77.0.4" in re.findall(r"address (10\.77\.0\.\d+) .*NUMA", said), said


def test_a_failure_ends_the_job_with_its_status(slurm: SlurmCluster, run_dir: Path) -> None:
    # The program fails at once, because it gets no folder.
    status, said = submit(slurm, run_dir, *JOB, "once")
    assert status != 0, said
    assert "IndexError" in said
    # No process of the job is left on any node.
    assert slurm.run("squeue", "--noheader").stdout.strip() == ""
