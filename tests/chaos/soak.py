"""A long training job over links that break, with ranks that die and rejoin: chaos.py --minutes.

A scheduler and two servers (--keep) serve two Megatron ranks under `torchrun --max-restarts`. Now
and then a host's connections are reset, its link is cut, or a server is stopped for a moment; no
process may end because of that. From time to time a rank is killed: torchrun restarts both ranks,
and they continue from the last checkpoint with the same servers. Memory, descriptors and threads of
every process are sampled.

Checks: training continues to the end and every process ends well; a repeated step gives exactly the
same loss; the samples are flat within the last half of each long generation of the ranks. For
processes that survive the ranks, samples are also flat between these generations.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from bench.kit.emulation import Host
from scripts import prepare_data, train
from scripts.children import Late, last_lines
from scripts.progress import Progress
from scripts.trainkit.job import ENTRY, read_record
from tests.chaos.broken_job import Job, run
from tests.chaos.seeds import Fault, Script
from tests.chaos.soak_figures import Sample, replayed, sample, table, trends

ROOT = Path(__file__).resolve().parents[2]
WORKERS, SERVERS = 2, 2
RANKS = "worker 0"
"""Node of torchrun, with both ranks."""
SAMPLE_S = 5.0
SAVE_EVERY = 50
LIVES = (1, 1, 10)
"""Times until a rank is killed, as parts of a cycle, repeated."""
CYCLE_S = 1800.0
START_S, END_S = 900.0, 600.0
"""Time limits in seconds, for a busy machine: until a generation's first step, and for the end."""


def _life_of(record: Path) -> int:
    return int(record.stem.partition("-")[2])


class Soak(Job):
    """A run of some minutes.

    Raises:
        RuntimeError: A process ended early, or does not train.
    """

    limits: ClassVar[Mapping[str, str]] = {}
    settings: ClassVar[Mapping[str, str]] = {"BYTEPS_KEEP": "1"}

    def __init__(
        self,
        seed: int,
        minutes: float,
        hosts: Sequence[Host],
        switch: str,
        programs: Path,
        folder: Path,
        shown: Progress,
    ) -> None:
        script = Script(
            seed=seed, workers=WORKERS, servers=SERVERS, rounds=0, tensors=0, size=0, faults=()
        )
        super().__init__(script, hosts, switch, programs, folder)
        self.samples: list[Sample] = []
        self.events: list[tuple[float, str]] = []
        self._shown = shown
        self._seconds = minutes * 60
        self._draw = random.Random(seed)
        self._begun = self._life_begun = time.monotonic()
        self._expected_life = 0
        self._trains_since: float | None = None

    @property
    def records(self) -> list[Path]:
        return sorted(self.folder.glob("life-*.jsonl"), key=_life_of)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _start_workers(self, life: int) -> None:
        dataset = prepare_data.prepare([], ROOT / "build" / "data", prepare_data.DEFAULT_MAX_BYTES)
        env = {name: value for name, value in self._env.items() if name != "DMLC_NUM_WORKER"}
        env |= {name: os.environ[name] for name in ("HOME",) if name in os.environ}
        env |= {"OMP_NUM_THREADS": "1", "MEGATRON_CPU": "1", "PYTHONWARNINGS": "ignore"}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        # Without this, ranks of a new generation could find addresses of the last one in the store.
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        saved = str(self.folder / "checkpoints")
        restarts = ("--max-restarts", "100000", "--monitor-interval", "0.5")
        steps = str(1000 + int(self._seconds * 20))  # more than possible
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", *restarts),
            *("--nproc-per-node", str(WORKERS), str(Path(__file__).with_name("soak_rank.py"))),
            *(str(ROOT / "build" / "Megatron-LM" / ENTRY), str(self.folder)),
            *(*train.MODEL, "--lr-decay-style", "constant", "--train-iters", steps),
            *("--data-path", str(dataset.prefix), "--data-cache-path", str(self.folder / "cache")),
            *("--save", saved, "--load", saved, "--save-interval", str(SAVE_EVERY)),
            *("--ckpt-format", "torch"),  # torch_dist starts processes for each checkpoint
            *("--save-retain-interval", str(SAVE_EVERY * 1_000_000), "--num-workers", "0"),
            *("--exit-signal-handler", "--use-dpu-reduce", "--dpu-reduce-backend", "flat"),
        ]
        self._spawn(RANKS, command, env)

    def _await_end(self) -> None:
        unit = CYCLE_S * min(1.0, self._seconds / CYCLE_S) / sum(LIVES)
        next_sample = next_fault = 0.0
        while True:
            lived = self._watch_life()
            self._demand_running()
            if lived is not None:
                steps = len(read_record(self.records[-1]).steps)
                self._shown.update(
                    f"life {self._expected_life}, {steps} steps", done=int(self._now)
                )
                if self._now >= self._seconds and self._expected_life > 0:
                    return self._end()
                # Late kills are left out, because the next generation would be too short to show
                # their effect.
                late = self._expected_life > 0 and self._now > self._seconds - 2 * unit
                if lived >= unit * LIVES[self._expected_life % len(LIVES)] and not late:
                    self._kill_a_rank()
                elif self._now >= next_fault:
                    self._break_something()
                    next_fault = self._now + self._draw.uniform(5, 30)
            if self._now >= next_sample:
                self._sample()
                next_sample = self._now + SAMPLE_S
            time.sleep(0.1)

    def _watch_life(self) -> float | None:
        """Return the training time of the current generation; None before its first step."""
        record = self.folder / f"life-{self._expected_life}.jsonl"
        newest = max([self._expected_life, *map(_life_of, self.records)])
        if newest > self._expected_life:
            self._wrong.append(
                f"life {newest} began, though nobody had killed a rank since another"
            )
            self._expected_life, self._trains_since = newest, None
            return None
        if self._trains_since is None:
            if record.exists() and read_record(record).steps:
                self._trains_since = time.monotonic()
            elif time.monotonic() - self._life_begun > START_S:
                tail = last_lines(self._processes[RANKS].log, 40)
                raise RuntimeError(f"generation {self._expected_life} does not train:\n{tail}")
            return None
        return time.monotonic() - self._trains_since

    def _demand_running(self) -> None:
        for name, process in self._processes.items():
            if not process.running:
                tail = last_lines(process.log, 40)
                raise RuntimeError(f"{name} ended with {process.status} before the end:\n{tail}")

    def _ranks(self) -> dict[int, int]:
        pids: dict[int, int] = {}
        for task in Path(f"/proc/{self._processes[RANKS].pid}/task").glob("*"):
            for pid in (task / "children").read_text().split():
                try:
                    words = (Path("/proc") / pid / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                values = dict(word.decode().partition("=")[::2] for word in words)
                if values.get("TORCHELASTIC_RESTART_COUNT") == str(self._expected_life):
                    pids[int(values["RANK"])] = int(pid)
        return pids

    def _sample(self) -> None:
        pids = {name: (node.pid, 0) for name, node in self._processes.items() if name != RANKS}
        life = self._expected_life
        pids |= {f"worker {rank}": (pid, life) for rank, pid in self._ranks().items()}
        for name, (pid, its_life) in pids.items():
            taken = sample(pid, name, its_life, self._now)
            if taken is not None:
                self.samples.append(taken)
        seen = {"samples": [asdict(taken) for taken in self.samples], "events": self.events}
        (self.folder / "samples.json").write_text(json.dumps(seen))

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
        node = self._draw.choice(list(self._processes))
        if kind == "stop" and not node.startswith("server"):
            node = "server 0"
        self.events.append((round(self._now, 2), kind))
        seconds = self._draw.choice([0.2, 1.0, 2.0])
        self._break(Fault(kind=kind, node=node, at_s=0.0, seconds=seconds))

    def _end(self) -> None:
        """Send SIGTERM: Megatron's signal handler saves a checkpoint and ends the ranks well."""
        self._mend()
        for pid in self._ranks().values():
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        for name in [RANKS, *(name for name in self._processes if name != RANKS)]:
            try:
                self._processes[name].wait(deadline - time.monotonic())
            except Late as late:
                self._wrong.append(str(late))

    def clear(self) -> None:
        """End all processes on the ranks' host. Each of them is in a session of its own."""
        for pid in run("ip", "netns", "pids", str(self._hosts[RANKS].namespace)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _judge(self, ended: dict[str, int]) -> None:
        for name, status in ended.items():
            if status != 0:
                tail = last_lines(self._processes[name].log, 20)
                self._wrong.append(f"{name} ended with exit status {status}:\n{tail}")

    def report(self) -> bool:
        """Print the results; return whether all checks passed."""
        all_trends = trends(self.samples)
        steps, again, differences = replayed(self.records)
        wrong = [*self._wrong, *differences[:10]]
        wrong += [
            f"{trend.node}, {trend.when}: {trend.quantity} grew by {trend.growth:,.1f}; flat is "
            f"less than {trend.limit:,.1f}"
            for trend in all_trends
            if not trend.flat
        ]
        kinds = [kind for _, kind in self.events]
        faults = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none"
        same = "ANOTHER LOSS" if differences else "the same loss to the last bit"
        text = "\n".join(node.text for node in self._processes.values())
        print(table(all_trends))
        print(
            f"faults: {faults}; connections made again: {text.count('was made again after')}\n"
            f"training: {steps} steps in {len(self.records)} lives; "
            f"{again} of them done again gave {same}"
        )
        for line in wrong:
            print(f"WRONG: {line}")
        print("soak: " + ("NOT all held" if wrong else "all held: everything is flat"))
        return not wrong
