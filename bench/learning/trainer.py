"""Trains models one after the other in one process, so that everything is compiled only once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.learning.model import FlatGPT, Size
from bench.learning.replicas import LocalSteps, Replicas
from bench.learning.wires import RECIPES, AdamW, Hosts


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate by step: linear warm-up, then cosine decay."""

    steps: int = 3000
    warm_up: int = 200
    rate: float = 2e-3
    least: float = 0.05
    """Fraction of `rate` at the end."""

    def rate_at(self, step: int) -> float:
        """Return the rate of a step. The first step is 1."""
        if step <= self.warm_up:
            return self.rate * step / self.warm_up
        part = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (self.least + (1 - self.least) * 0.5 * (1 + math.cos(math.pi * part)))


@dataclass(frozen=True, kw_only=True)
class How:
    """Settings for the speed of a step. They change results only by the order of additions on a
    GPU."""

    compiled: bool = False
    graph: bool = False
    """Whether one CUDA graph holds the forward and backward passes of all hosts."""
    streams: int = 1
    """Number of CUDA streams on which hosts compute concurrently."""


class Corpus:
    """Tokens on the device, as whole sequences. Each also has the first token of the next one."""

    def __init__(self, folder: Path, packs: int, size: Size, device: torch.device) -> None:
        """Read the first `packs` training packs of `folder`, which tokens.py has written."""
        paths = [folder / f"train-{pack}.tokens" for pack in range(packs)]
        parts = [np.fromfile(path, dtype=np.uint16) for path in paths]
        self.train = self._sequences(np.concatenate(parts), size, device)
        held_out = np.fromfile(folder / "held-out.tokens", dtype=np.uint16)
        self.held_out = self._sequences(held_out, size, device)

    @staticmethod
    def _sequences(tokens: np.ndarray, size: Size, device: torch.device) -> torch.Tensor:
        count = (len(tokens) - 1) // size.sequence
        flat = torch.from_numpy(tokens.astype(np.int32)).to(device)
        return flat.as_strided((count, size.sequence + 1), (size.sequence, 1))


@dataclass
class Run:
    """A model in training."""

    wire: str
    seed: int
    local: LocalSteps | None = None
    """Exchanges of replicas. None: gradients are summed as `wire` says."""
    step: int = 0
    losses: list[float] = field(default_factory=list)
    """Mean training loss of every `Trainer.EVERY` steps."""
    by_host: list[float] = field(default_factory=list)
    """Loss of each host in the last step."""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.wire}-{self.seed}"


class Trainer:
    """Memory of a model, and the functions that train it."""

    EVERY = 50
    """Number of steps between two looks at the clock. A look waits for the GPU."""

    def __init__(
        self,
        corpus: Corpus,
        size: Size,
        schedule: Schedule,
        how: How,
        device: torch.device,
        adamw: AdamW | None = None,
        *,
        has_replicas: bool = False,
    ) -> None:
        """With `has_replicas` each host has parameters of its own, and `How.streams` is 1."""
        self.corpus, self.size, self.schedule, self.how = corpus, size, schedule, how
        self.device, self.adamw = device, adamw or AdamW()
        self.flat = FlatGPT(size, device)
        self.hosts: Hosts | Replicas
        if has_replicas:
            self.hosts = Replicas(self.flat.held, self.flat.few, size.hosts)
        else:
            shards = self.flat.shards(size.hosts)
            self.hosts = Hosts(self.flat.held, self.flat.few, size.hosts, shards)
        shape = (size.hosts, size.batch, size.sequence + 1)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        numel = self.flat.held.numel()
        # Each host has a row. The padding at the end of a row stays 0.
        self._few, self._exact = (
            torch.zeros(size.hosts, count, dtype=torch.bfloat16, device=device)
            for count in (self.flat.few, numel - self.flat.few)
        )
        self._loss = torch.zeros(size.hosts, device=device)
        self._model: Callable[[torch.Tensor], torch.Tensor] = self.flat.model
        if how.compiled:
            self._model = torch.compile(self.flat.model, fullgraph=True)
        self._graph = self._captured() if how.graph else None

    def _one_host(self, host: int) -> None:
        self.hosts.choose(host)
        loss = self._model(self._tokens[host])
        gradients = torch.autograd.grad(loss, self.flat.parameters)
        large = len(self.flat.large)
        flat = [gradient.reshape(-1) for gradient in gradients]
        for row, parts in ((self._few[host], flat[:large]), (self._exact[host], flat[large:])):
            count = sum(part.numel() for part in parts)
            torch.cat(parts, out=row[:count])
        self._loss[host] = loss.detach()

    def _all_hosts(self) -> None:
        if self.how.streams < 2:
            for host in range(self.size.hosts):
                self._one_host(host)
            return
        current = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in range(self.how.streams)]
        for stream in streams:
            stream.wait_stream(current)
        for host in range(self.size.hosts):
            with torch.cuda.stream(streams[host % len(streams)]):
                self._one_host(host)
        for stream in streams:
            current.wait_stream(stream)

    def _captured(self) -> torch.cuda.CUDAGraph:
        # A first run compiles kernels, and lets libraries allocate memory, before the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._one_host(0)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._all_hosts()
        return graph

    def start(self, run: Run, checkpoint: Path | None = None) -> None:
        """Begin a run, or resume it from its checkpoint."""
        values = self.flat.first_values(self.size, run.seed).to(self.device)
        if isinstance(self.hosts, Replicas):
            assert run.local is not None
            self.hosts.start(run.local, self.adamw, values)
        else:
            self.hosts.start(RECIPES[run.wire], self.adamw, values)
        per_step = self.size.hosts * self.size.batch
        needed = self.schedule.steps * per_step
        order = torch.Generator().manual_seed(run.seed)
        count = len(self.corpus.train)
        epochs = [torch.randperm(count, generator=order) for _ in range(-(-needed // count))]
        self._order = torch.cat(epochs)[:needed].to(self.device).view(-1, per_step)
        steps = range(1, self.schedule.steps + 1)
        numbers = [self.adamw.numbers(step, self.schedule.rate_at(step)) for step in steps]
        self._numbers = torch.tensor(numbers, dtype=torch.float32, device=self.device)
        if checkpoint is not None and checkpoint.exists():
            assert isinstance(self.hosts, Hosts)
            saved = torch.load(checkpoint, map_location=self.device)
            self.hosts.load(saved["state"])
            run.step, run.losses, run.seconds = saved["step"], saved["losses"], saved["seconds"]

    def save(self, run: Run, checkpoint: Path) -> None:
        """Save the state from which `start` resumes."""
        assert isinstance(self.hosts, Hosts)
        saved: dict[str, Any] = {"state": self.hosts.state(), "step": run.step}
        saved |= {"losses": run.losses, "seconds": run.seconds}
        torch.save(saved, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    def advance(self, run: Run) -> None:
        """Make the next `EVERY` steps."""
        began = time.monotonic()
        total = torch.zeros((), device=self.device)
        steps = min(self.EVERY, self.schedule.steps - run.step)
        for _ in range(steps):
            self._step(run.step)
            total += self._loss.mean()
            run.step += 1
        run.losses.append(total.item() / steps)
        run.by_host = self._loss.tolist()
        run.seconds += time.monotonic() - began

    def _step(self, step: int) -> None:
        batch = self.corpus.train[self._order[step]]
        self._tokens.copy_(batch.view(self._tokens.shape))
        if self._graph is None:
            self._all_hosts()
        else:
            self._graph.replay()
        with torch.no_grad():
            self.hosts.step(self._few, self._exact, self._numbers[step])

    def held_out_loss(self, most: int = 1 << 30) -> float:
        """Return the loss in nats per token, over at most `most` sequences."""
        batch = self.size.batch
        count = min(most, len(self.corpus.held_out)) // batch * batch
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for begin in range(0, count, batch):
                total += self._model(self.corpus.held_out[begin : begin + batch].long())
        return total.item() / (count // batch)
