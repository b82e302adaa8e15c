"""Failures that a job must survive. A run with each is compared with a run without failures."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from bench.ray_failures.nodes import Nodes
from megatron_byteps_ray.cluster import Pool
from megatron_byteps_ray.job import Job, record_of_steps
from megatron_byteps_ray.settings import PRELOAD, Settings
from tests.layouts.job import CPU, Platform
from tests.layouts.under_ray.modes import ROOT, environment_on, settings_on

STEPS, SAVE_EVERY, STRIKE = 12, 4, 7
RANKS, SPARES = 2, 3
SCHEDULER, SERVER = 0, 1

MODEL: tuple[str, ...] = tuple(
    """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4
    --hidden-dropout 0.1 --attention-dropout 0.1 --optimizer adam --lr 1e-3 --min-lr 1e-4
    --lr-decay-style cosine --split 100,0,0 --eval-iters 0 --eval-interval 1000000
    --log-interval 1 --seed 1234 --mock-data --use-dpu-reduce --dpu-reduce-backend flat
    """.split()  # noqa: SIM905
)

ENVIRONMENT = environment_on(CPU)

IN_BACKGROUND = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
"""Arguments that make a process next to each rank write checkpoints. Without the second flag
Megatron ignores the first. Its other strategy needs another package."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Kind of failure that a job must survive."""

    title: str
    ranks: int = RANKS
    faults: Sequence[Mapping[str, Any]] = ()
    breaks: int | None = None
    """Index of the BytePS process that the driver kills (0: the scheduler). Rank 0 holds a step
    meanwhile."""
    loses_node: bool = False
    """Whether the driver kills a machine that has a rank; see `nodes`. Rank 0 holds a step
    meanwhile."""
    generations: int = 2
    """Number of generations, including failed ones."""
    blames: str = ""
    """Text that the first failure must contain."""
    limits: Mapping[str, float] = field(default_factory=dict)
    model: Sequence[str] = MODEL
    """Arguments of the training script that describe the model."""
    arguments: Sequence[str] = ()
    saves: bool = True
    """Whether the job saves checkpoints."""
    memory_every: int | None = None
    """Number of steps between states that are kept in memory, from which recoveries start."""
    thorough: bool = False


def _fault(rank: int, what: str, when: int | str = STRIKE, generation: int = 0) -> dict[str, Any]:
    return {"generation": generation, "rank": rank, "when": when, "what": what}


CASES = {
    "rank-0": Case(
        title="rank 0's process is killed",
        faults=[_fault(0, "kill")],
        blames="rank 0 was killed by signal 9",
    ),
    "actor": Case(
        title="another rank's actor is killed, as with its machine",
        faults=[_fault(1, "actor")],
        blames="rank 1 was lost with its actor",
    ),
    "two": Case(
        title="both ranks' actors are killed at once",
        faults=[_fault(0, "actor"), _fault(1, "actor")],
        blames="was lost with its actor",
    ),
    "hung": Case(
        title="a rank hangs",
        faults=[_fault(1, "sleep")],
        blames="rank 1 hung",
        limits={"step": 40.0},
    ),
    "frozen": Case(
        title="a rank's process is stopped",
        faults=[_fault(0, "freeze")],
        blames="rank 0 hung",
        limits={"beat": 40.0},
        thorough=True,
    ),
    "server": Case(
        title="the server is killed",
        faults=[_fault(0, "hold:{folder}/go")],
        breaks=SERVER,
        blames="server 0 was killed by signal 9",
    ),
    "scheduler": Case(
        title="the scheduler is killed",
        # Rank 0 sleeps, because workers take a second to notice the failure.
        faults=[_fault(0, "sleep")],
        breaks=SCHEDULER,
        blames="scheduler was killed by signal 9",
    ),
    "recovery": Case(
        title="a rank is killed, and another one during the recovery",
        faults=[_fault(0, "kill"), _fault(1, "kill", "start", generation=1)],
        generations=3,
        blames="rank 0 was killed by signal 9",
    ),
    "checkpoint": Case(
        title="a rank is killed while a checkpoint is written",
        faults=[_fault(1, "kill", "save")],
        blames="rank 1 was killed by signal 9",
    ),
    "start": Case(
        title="a rank is killed during the start",
        faults=[_fault(1, "kill", "start")],
        blames="rank 1 was killed by signal 9",
        thorough=True,
    ),
    "raises": Case(
        title="a rank raises an error",
        faults=[_fault(1, "raise")],
        blames="rank 1 ended with exit status 1: RuntimeError: a fault that the script asked for",
        thorough=True,
    ),
    "sharded": Case(
        title="a rank's actor is killed, with the distributed optimizer",
        faults=[_fault(1, "actor")],
        blames="rank 1 was lost with its actor",
        arguments=["--use-distributed-optimizer"],
        thorough=True,
    ),
    "async-save": Case(
        title="a rank's actor is killed, with checkpoints written in the background",
        faults=[_fault(1, "actor", STRIKE + 2)],
        blames="rank 1 was lost with its actor",
        arguments=IN_BACKGROUND,
        thorough=True,
    ),
    "node": Case(
        title="a whole machine is killed, and a spare machine takes its rank",
        faults=[_fault(0, "hold:{folder}/go")],
        loses_node=True,
        blames="was lost with its actor",
    ),
    "tp2": Case(
        title="a rank's actor is killed: 4 ranks, tensor parallelism 2",
        ranks=4,
        faults=[_fault(3, "actor")],
        blames="rank 3 was lost with its actor",
        arguments=["--tensor-model-parallel-size", "2"],
    ),
    "pp2": Case(
        title="a rank's actor is killed: 4 ranks, pipeline parallelism 2",
        ranks=4,
        faults=[_fault(2, "actor")],
        blames="rank 2 was lost with its actor",
        arguments=["--pipeline-model-parallel-size", "2", "--num-layers", "2"],
        thorough=True,
    ),
    "dp4": Case(
        title="a rank's actor is killed: 4 ranks, the distributed optimizer",
        ranks=4,
        faults=[_fault(1, "actor")],
        blames="rank 1 was lost with its actor",
        arguments=["--global-batch-size", "8", "--use-distributed-optimizer"],
        thorough=True,
    ),
    "ep2": Case(
        title="a rank's actor is killed: expert parallelism 2",
        faults=[_fault(1, "actor")],
        blames="rank 1 was lost with its actor",
        arguments=[
            *("--expert-model-parallel-size", "2", "--num-experts", "4"),
            *("--moe-router-topk", "2", "--disable-bias-linear"),
        ],
        thorough=True,
    ),
    "memory": Case(
        title="a rank's actor is killed before a checkpoint: its state is in memory",
        faults=[_fault(1, "actor")],
        blames="rank 1 was lost with its actor",
        saves=False,
        memory_every=2,
    ),
    "memory-process": Case(
        title="rank 0's process is killed before a checkpoint: its state is in memory",
        faults=[_fault(0, "kill")],
        blames="rank 0 was killed by signal 9",
        saves=False,
        memory_every=2,
        thorough=True,
    ),
    "memory-dp4": Case(
        title="a rank's actor is killed before a checkpoint: 4 ranks, the distributed optimizer",
        ranks=4,
        faults=[_fault(2, "actor")],
        blames="rank 2 was lost with its actor",
        arguments=["--global-batch-size", "8", "--use-distributed-optimizer"],
        saves=False,
        memory_every=2,
        thorough=True,
    ),
}

_PLAIN = Case(title="", generations=1)

ROOM = 3
"""Cores of the first node that a pool leaves to ``several_nodes``: for the scheduler, the server,
and one rank."""


def cluster_settings(settings: Settings) -> Settings:
    """Return settings for the cluster of a pool with these settings. They leave that room."""
    return replace(settings, ranks=settings.ranks + ROOM)


@contextmanager
def several_nodes(folder: Path) -> Iterator[Runner]:
    """Return a context with two ranks and a spare, each on a node of its own. A case may kill two
    of the nodes.

    It needs the cluster that ``cluster_settings`` describes, without other jobs.
    """
    nodes = Nodes(folder / "nodes")
    settings = pool_settings(folder / "pool", spares=1)
    pool = Pool(settings)
    try:
        for _ in range(2):
            nodes.add(cpus=1)
        pool.open()
        yield Runner(pool, settings, folder / "jobs", nodes)
    finally:
        pool.close()
        nodes.close()


def pool_settings(
    folder: Path,
    *,
    spares: int = SPARES,
    preload: Sequence[str] = PRELOAD,
    platform: Platform = CPU,
) -> Settings:
    """Return the settings of the pool that all cases share, so that its actors import everything
    only once."""
    settings = settings_on(
        platform,
        folder,
        entry="bench.ray_failures.faulty_gpt:main",
        ranks=RANKS,
        spares=spares,
        preload=(*preload, "pretrain_dpu_gpt"),
    )
    # Megatron's local checkpoints need this package, which no environment has.
    command = [str(ROOT / "scripts/tools.sh"), "nvrx"]
    package = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return replace(settings, python_path=(*settings.python_path, package))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a job."""

    folder: Path
    """Folder of the job."""
    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    """Steps that the driver has recorded, including repeated ones."""
    state: dict[str, Any]
    """The driver's state file."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> dict[int, list[float]]:
        """Return the losses of each step, one per generation that has made the step."""
        result: dict[int, list[float]] = {}
        for step in self.steps:
            result.setdefault(step["step"], []).append(step["values"]["lm loss"])
        return result


class Runner:
    """Runs jobs, one after the other, on the actors of a pool."""

    def __init__(
        self, pool: Pool, settings: Settings, folder: Path, nodes: Nodes | None = None
    ) -> None:
        """``settings``: settings of the pool. ``nodes``: nodes that may be lost."""
        self.pool = pool
        self._nodes = nodes
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._whole: dict[tuple[str, ...], Outcome] = {}

    def run(
        self,
        name: str,
        case: Case,
        on_event: Callable[[dict[str, Any], Job], None] | None = None,
        **changes: Any,
    ) -> Outcome:
        """Run a job in a folder of its own. ``changes`` are applied to its settings."""
        # Actors that the previous job has lost are still being replaced.
        actors = self._settings.ranks + self._settings.spares
        if not self.pool.wait_warm(actors, self._settings.limits.warm):
            raise RuntimeError(
                f"the pool has no {actors} warm actors after {self._settings.limits.warm:g} s"
            )
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        every = SAVE_EVERY if case.saves else STEPS
        saved = ["--save", str(folder / "saved"), "--save-interval", str(every)]
        faults = json.dumps(list(case.faults)).replace("{folder}", str(folder))
        own = [argument.replace("{folder}", str(folder)) for argument in case.arguments]
        events: list[dict[str, Any]] = []
        changes.setdefault("memory_save_interval", case.memory_every)
        settings = replace(
            self._settings,
            ranks=case.ranks,
            folder=folder,
            arguments=(
                *case.model,
                *("--train-iters", str(STEPS)),
                *saved,
                *own,
                *self._settings.arguments,
            ),
            environment={
                **self._settings.environment,
                "SCRIPTED_FAULTS": faults,
                "SCRIPTED_STATE": str(folder / "job.json"),
            },
            limits=replace(self._settings.limits, **case.limits),
            **changes,
        )
        broken = False

        def listen(event: dict[str, Any]) -> None:
            nonlocal broken
            events.append(event)
            if event["event"] == "step" and not broken:
                broken = True
                self._break(case)
                # Ranks have waited for this file, and continue only now.
                (folder / "go").touch()
            if on_event is not None:
                on_event(event, job)

        job = Job(settings, listen, self.pool)
        job.run()
        return Outcome(
            folder=folder,
            events=events,
            steps=record_of_steps(folder),
            state=json.loads((folder / "job.json").read_text()),
        )

    def _break(self, case: Case) -> None:
        """Kill the processes of the case."""
        if case.breaks is not None:
            ray.get(self.pool.byteps[case.breaks].signal.remote(9))  # number 9 is SIGKILL
        if case.loses_node:
            assert self._nodes is not None
            places = [slot.facts["node"] for slot in self.pool.assigned]
            self._nodes.lose(next(node for node in places if node in self._nodes.known))

    def uninterrupted(self, case: Case) -> Outcome:
        """Return the result of the same job without faults."""
        key = (str(case.ranks), *case.model, *case.arguments)
        if key not in self._whole:
            plain = replace(_PLAIN, ranks=case.ranks, model=case.model, arguments=case.arguments)
            self._whole[key] = self.run(f"whole{len(self._whole)}", plain)
        return self._whole[key]


def problems(case: Case, outcome: Outcome, uninterrupted: Outcome) -> list[str]:
    """Return descriptions of deviations. Empty if the job has survived the failure."""
    wrong, whole = [], uninterrupted.losses
    failures = outcome.of("failure")
    count = len(outcome.of("generation"))
    # On a busy machine, time limits of steps may end more generations than planned.
    if count < case.generations or (count > case.generations and not case.limits):
        wrong.append(f"{count} generations instead of {case.generations}: {failures}")
    if failures and case.blames not in str(failures[0]["failure"]):
        wrong.append(f"the blame is {str(failures[0]['failure'])!r}, not {case.blames!r}")
    if sorted(whole) != list(range(1, STEPS + 1)):
        wrong.append(f"the run without faults has the steps {sorted(whole)}")
    if sorted(outcome.losses) != sorted(whole):
        wrong.append(f"steps {sorted(outcome.losses)} instead of {sorted(whole)}")
    for step, losses in outcome.losses.items():
        # The losses of every generation count, before and after the failure.
        if set(losses) != set(whole.get(step, [])):
            wrong.append(f"step {step}: losses {losses}, without faults {whole.get(step)}")
    recovered = outcome.of("recovered")
    repeated = [step["step"] for step in outcome.steps if step["generation"]]
    if case.memory_every is not None and min(repeated, default=1) == 1:
        wrong.append("training began anew, not from the state in memory")
    if case.generations > 1 and not recovered:
        wrong.append("no recovery was reported")
    return wrong
