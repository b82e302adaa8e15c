#!/usr/bin/env python3
"""Trains for an hour over links that break, with workers that die and rejoin, and watches leaks.

A scheduler and two servers (--keep) and two Megatron ranks under `torchrun --max-restarts` run on
emulated hosts. Now and then a host's connections are reset, its link is cut or a server is stopped
for a moment, which must end nothing. From time to time a rank is killed: torchrun starts both
again, and they go on from the last checkpoint with the servers that were there. Memory,
descriptors and threads of every process are sampled.

Demanded: training goes on to the end and every process ends well; a step that is done again, or
was done before a fault, gives the same loss to the last bit; what was sampled is flat within
the last half of each long life of the ranks, and of what outlives them from one to the next.

Exit status: 0 all of it held; 1 something did not, which is said. Needs root, and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from scripts import prepare_data, train
from scripts.children import Late, Spawned, end_all, last_lines, server_executable
from scripts.progress import Progress
from scripts.trainkit.job import ENTRY, read_record
from tests.chaos.soak_figures import Sample, draw, replayed, sample, table, trends

ROOT = Path(__file__).resolve().parents[2]
WORKERS, SERVERS = 2, 2
LINK_BITS = 1_000_000_000
SAMPLE_S = 5.0
SAVE_EVERY = 50
LIVES = (1, 1, 10)
"""How long a rank trains until one is killed, in parts of a cycle, over and over."""
CYCLE_S = 1800.0
START_S, END_S = 900.0, 600.0
"""Limits, for a machine on which others work: until a life's first step, and of the end."""
# ----- the run


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _life_of(record: Path) -> int:
    return int(record.stem.partition("-")[2])


class Soak:
    """One run."""

    def __init__(self, hosts: Sequence[Host], folder: Path, minutes: float, seed: int) -> None:
        self.samples: list[Sample] = []
        self.events: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self.folder = folder
        names = ["scheduler", *(f"server {i}" for i in range(SERVERS)), "workers"]
        self._hosts = dict(zip(names, hosts, strict=True))
        self._ports = {name: f"port{i}" for i, name in enumerate(names)}
        self._switch = str(hosts[0].namespace).rpartition("-")[0] + "-switch"
        self._seconds = minutes * 60
        self._draw = random.Random(seed)
        self._begun = time.monotonic()
        self._nodes: dict[str, Spawned] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._expected_life = 0
        self._life_begun = self._begun
        self._trains_since: float | None = None

    @property
    def records(self) -> list[Path]:
        return sorted(self.folder.glob("life-*.jsonl"), key=_life_of)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    def run(self, shown: Progress) -> None:
        try:
            self._start()
            self._go_on(shown)
            self._end()
        finally:
            for _, mend in self._later:
                mend()
            # Ranks are in sessions of their own, and torchrun would give them half a minute.
            self._kill_all_on(self._hosts["workers"])
            end_all([process for process in self._nodes.values() if process.running], 10)

    def _kill_all_on(self, host: Host) -> None:
        command = ("ip", "netns", "pids", str(host.namespace))
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _start(self) -> None:
        port_file = self.folder / "scheduler.port"
        dataset = prepare_data.prepare([], ROOT / "build" / "data", prepare_data.DEFAULT_MAX_BYTES)
        env = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "TMPDIR": str(self.folder),
            "BYTEPS_KEEP": "1",
            "BYTEPS_SECRET": secrets.token_hex(32),
            "BYTEPS_PARTITION_BYTES": "65536",
            "DMLC_PS_ROOT_URI": self._hosts["scheduler"].address,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_WORKER": str(WORKERS),
            "DMLC_NUM_SERVER": str(SERVERS),
        }
        server = server_executable()
        scheduler = [server, "--role", "scheduler", "--port-file", str(port_file)]
        self._spawn("scheduler", scheduler, env)
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            if time.monotonic() > deadline or not self._nodes["scheduler"].running:
                raise RuntimeError(f"no scheduler:\n{self._nodes['scheduler'].text}")
            time.sleep(0.05)
        env["DMLC_PS_ROOT_PORT"] = port_file.read_text().split()[1]
        for index in range(SERVERS):
            self._spawn(f"server {index}", [server, "--role", "server"], env)
        del env["DMLC_NUM_WORKER"]
        env |= {"OMP_NUM_THREADS": "1", "MEGATRON_CPU": "1", "PYTHONWARNINGS": "ignore"}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        # Else the ranks of one life may find there the addresses of those of the last.
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._spawn("workers", self._training(str(dataset.prefix)), env)

    def _training(self, data: str) -> list[str]:
        saved = str(self.folder / "checkpoints")
        restarts = ("--max-restarts", "100000", "--monitor-interval", "0.5")
        steps = str(1000 + int(self._seconds * 20))  # more than can be done
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", *restarts),
            *("--nproc-per-node", str(WORKERS), str(Path(__file__).with_name("soak_rank.py"))),
            *(str(ROOT / "build" / "Megatron-LM" / ENTRY), str(self.folder)),
            *(*train.MODEL, "--lr-decay-style", "constant", "--train-iters", steps),
            *("--data-path", data, "--data-cache-path", str(self.folder / "cache")),
            *("--save", saved, "--load", saved, "--save-interval", str(SAVE_EVERY)),
            *("--ckpt-format", "torch"),  # the other one starts processes for each
            *("--save-retain-interval", str(SAVE_EVERY * 1_000_000), "--num-workers", "0"),
            *("--exit-signal-handler", "--use-dpu-reduce", "--dpu-reduce-route", "flat"),
        ]

    def _spawn(self, name: str, command: list[str], env: dict[str, str]) -> None:
        command = self._hosts[name].command(command)
        self._nodes[name] = Spawned(name, command, env, self.folder)

    def _go_on(self, shown: Progress) -> None:
        unit = CYCLE_S * min(1.0, self._seconds / CYCLE_S) / sum(LIVES)
        next_sample = next_fault = 0.0
        while True:
            lived = self._watch_life()
            self._demand_running()
            if lived is not None:
                steps = len(read_record(self.records[-1]).steps)
                shown.update(f"life {self._expected_life}, {steps} steps", done=int(self._now))
                if self._now >= self._seconds and self._expected_life > 0:
                    return
                # None is killed so late that the next life could not be seen.
                late = self._expected_life > 0 and self._now > self._seconds - 2 * unit
                if lived >= unit * LIVES[self._expected_life % len(LIVES)] and not late:
                    self._kill_a_rank()
                elif self._now >= next_fault:
                    self._break_something()
                    next_fault = self._now + self._draw.uniform(5, 30)
            if self._now >= next_sample:
                self._sample()
                next_sample = self._now + SAMPLE_S
            self._mend()
            time.sleep(0.1)

    def _watch_life(self) -> float | None:
        """For how long the present life has trained; None while it does not yet."""
        record = self.folder / f"life-{self._expected_life}.jsonl"
        newest = max([self._expected_life, *map(_life_of, self.records)])
        if newest > self._expected_life:
            self.wrong.append(f"life {newest} began, though nobody had killed a rank since another")
            self._expected_life, self._trains_since = newest, None
            return None
        if self._trains_since is None:
            if record.exists() and read_record(record).steps:
                self._trains_since = time.monotonic()
            elif time.monotonic() - self._life_begun > START_S:
                tail = last_lines(self._nodes["workers"].log, 40)
                raise RuntimeError(f"life {self._expected_life} does not train:\n{tail}")
            return None
        return time.monotonic() - self._trains_since

    def _demand_running(self) -> None:
        for name, process in self._nodes.items():
            if not process.running:
                tail = last_lines(process.log, 40)
                raise RuntimeError(f"{name} ended with {process.status} before the end:\n{tail}")

    def _ranks(self) -> dict[int, int]:
        """Pids by rank."""
        found: dict[int, int] = {}
        workers = self._nodes.get("workers")
        if workers is None or not workers.running:
            return found
        for task in Path(f"/proc/{workers.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                try:
                    words = (Path("/proc") / pid / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                values = dict(word.decode().partition("=")[::2] for word in words)
                if values.get("TORCHELASTIC_RESTART_COUNT") == str(self._expected_life):
                    found[int(values["RANK"])] = int(pid)
        return found

    def _sample(self) -> None:
        pids = {name: (node.pid, 0) for name, node in self._nodes.items() if name != "workers"}
        life = self._expected_life
        pids |= {f"worker {rank}": (pid, life) for rank, pid in self._ranks().items()}
        for name, (pid, its_life) in pids.items():
            one = sample(pid, name, its_life, self._now)
            if one is not None:
                self.samples.append(one)
        seen = {"samples": [asdict(one) for one in self.samples], "events": self.events}
        (self.folder / "samples.json").write_text(json.dumps(seen))

    # ----- faults

    def _kill_a_rank(self) -> None:
        ranks = self._ranks()
        victim = self._draw.randrange(WORKERS)
        if victim not in ranks:
            return
        self.events.append((round(self._now, 2), "kill"))
        os.kill(ranks[victim], signal.SIGKILL)
        self._expected_life, self._trains_since = self._expected_life + 1, None
        self._life_begun = time.monotonic()

    def _break_something(self) -> None:
        kind = self._draw.choice(["reset", "reset", "reset", "reset", "cut", "stop"])
        name = self._draw.choice(list(self._hosts))
        seconds = self._draw.choice([0.2, 1.0, 2.0])
        self.events.append((round(self._now, 2), kind))
        if kind == "reset":
            # The ranks' own connections with each other go over the loopback, and stay.
            namespace = str(self._hosts[name].namespace)
            network = self._hosts[name].address.rpartition(".")[0] + ".0/24"
            command = ("ss", "-K", "state", "established", "dst", network)
            _run("ip", "netns", "exec", namespace, *command)
        elif kind == "cut":
            link = ("ip", "-n", self._switch, "link", "set", self._ports[name])
            _run(*link, "down")
            self._later.append((self._now + seconds, lambda: _run(*link, "up")))
        else:
            node = self._nodes["server 0" if name in ("workers", "scheduler") else name]
            node.send(signal.SIGSTOP)
            self._later.append((self._now + seconds, lambda: node.send(signal.SIGCONT)))

    def _mend(self) -> None:
        for entry in [entry for entry in self._later if self._now >= entry[0]]:
            self._later.remove(entry)
            entry[1]()

    # ----- the end

    def _end(self) -> None:
        """Megatron's signal handler saves a checkpoint and ends the ranks well."""
        for _, mend in self._later:
            mend()
        self._later.clear()
        for pid in self._ranks().values():
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        for name in ["workers", *(name for name in self._nodes if name != "workers")]:
            try:
                status = self._nodes[name].wait(deadline - time.monotonic())
            except Late as late:
                self.wrong.append(str(late))
                continue
            if status != 0:
                tail = last_lines(self._nodes[name].log, 20)
                self.wrong.append(f"{name} ended with exit status {status}:\n{tail}")

    def count(self, words: str) -> int:
        """Lines with these words in all logs."""
        return sum(
            words in line for node in self._nodes.values() for line in node.text.splitlines()
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/soak", help="default build/soak")
    parser.add_argument("--picture", type=Path, help="default soak.png in the folder of --out")
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error("--minutes takes a positive number")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    topology = Topology(
        workers=SERVERS + 2,
        servers=1,
        colocate=True,
        emulated_hosts=SERVERS + 2,
        link_bits=LINK_BITS,
        fair_queue=False,
        mtu=1500,
    )
    with (
        Emulation(topology) as emulation,
        Progress("soak", total=int(options.minutes * 60), unit="s") as shown,
    ):
        soak = Soak(emulation.hosts, out, options.minutes, options.seed)
        try:
            soak.run(shown)
        except (RuntimeError, OSError) as error:
            soak.wrong.append(str(error))
    return report(soak, options.picture or out / "soak.png")


def report(soak: Soak, picture: Path) -> int:
    """Print what was found; return the exit status."""
    found = trends(soak.samples)
    steps, again, differences = replayed(soak.records)
    wrong = [*soak.wrong, *differences[:10]]
    wrong += [
        f"{one.node}, {one.when}: {one.quantity} grew by {one.growth:,.1f}; flat is less than "
        f"{one.limit:,.1f}"
        for one in found
        if not one.flat
    ]
    if soak.samples:
        draw(soak.samples, soak.events, picture)
    kinds = [kind for _, kind in soak.events]
    faults = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none"
    made_again = soak.count("was made again after")
    print(table(found))
    print(
        f"faults: {faults}; connections made again: {made_again}\n"
        f"training: {steps} steps in {len(soak.records)} lives; {again} of them done again gave "
        f"{'the same loss to the last bit' if not differences else 'ANOTHER LOSS'}\n"
        f"picture: {picture}"
    )
    for line in wrong:
        print(f"WRONG: {line}")
    print("soak: " + ("NOT all held" if wrong else "all held: everything is flat"))
    return 1 if wrong else 0


if __name__ == "__main__":
    # Terminated or interrupted: hosts and processes go either way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
