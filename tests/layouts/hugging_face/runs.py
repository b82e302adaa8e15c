"""Trains a layout through both backends and looks at the files that come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.layouts.job import Job
from tests.layouts.platforms import THROUGH_SERVERS, TWO_SERVERS

from .rows import STEPS, Layout

PROGRAMS = "tests.layouts.hugging_face.rank"
# As the program's names; that module takes seconds to import, and the parent does without.
BEFORE, AFTER, ADAPTER = "before", "after", "adapter"
TOLERANCE = 2e-5
"""Of logits, compared with the largest of them: the two programs add in different orders."""


def make_model(name: str, folder: Path) -> Path:
    """Write a tiny model below the folder, if it is not there."""
    job = Job(folder / f"make-{name}", f"{PROGRAMS}:make_model", 1, {"name": name})
    if not job.folder.exists():
        job.run()
    return job.folder / name


def train(
    layout: Layout,
    model: Path,
    folder: Path,
    data: Sequence[str],
    *,
    lora: bool,
    through_byteps: bool,
    fails: bool = False,
    **options: object,
) -> Job:
    """One run, each rank a process.

    Raises:
        JobFailed: a rank failed, or with ``fails`` one did not.
    """
    arguments = ["--hf-model", str(model), *layout.arguments(lora=lora), *data]
    settings: dict[str, Any] = {"arguments": arguments, **options}
    if through_byteps:
        settings["arguments"] = [*arguments, *THROUGH_SERVERS]
        settings["environment"] = TWO_SERVERS
    job = Job(folder, f"{PROGRAMS}:train", layout.ranks, settings)
    job.run(fails=fails)
    return job


def tensors(folder: Path) -> dict[str, Any]:
    """All weights of a Hugging Face folder."""
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights, to the last bit."""
    import torch

    a, b = tensors(one), tensors(other)
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one layout, whole or by adapters."""

    round_trip: bool
    """The files written before the first step hold the bits that were read."""
    moved: bool
    """Training changed the weights."""
    equal: bool
    """Both backends wrote the same bits."""
    logits: float
    """Largest difference between Megatron's and those of the written files, of the largest."""
    adapter_logits: float | None
    """The same of the model with the written adapter; None without one."""
    bucketed: float
    """Elements of the gradient buckets, of the parameters that are trained."""
    pushed: float
    """Bytes that the ranks pushed, of those in buckets that several ranks sum."""
    trained: float
    """Part of all parameters that is trained."""
    frozen_changed: list[str]
    without_gradient: list[str]

    def problems(self) -> list[str]:
        """What is not as it must be."""
        wrong = {
            "what is written before training differs from what was read": not self.round_trip,
            "training changed nothing": not self.moved,
            "the backends wrote different weights": not self.equal,
            f"logits differ by {self.logits:.1e}": not self.logits <= TOLERANCE,
            f"{self.bucketed:.3f} of what is trained is in buckets": not 1 <= self.bucketed < 1.05,
            f"{self.pushed:.3f} of the buckets' bytes were pushed": self.pushed != 1.0,
            f"frozen weights changed: {self.frozen_changed}": bool(self.frozen_changed),
            f"no gradient: {self.without_gradient}": bool(self.without_gradient),
        }
        if self.adapter_logits is not None:
            text = f"logits with the adapter differ by {self.adapter_logits:.1e}"
            wrong[text] = not self.adapter_logits <= TOLERANCE
        return [text for text, is_so in wrong.items() if is_so]


def compare(
    layout: Layout, folder: Path, models: Path, data: Sequence[str], *, lora: bool
) -> Outcome:
    """Train through both backends, and compare.

    Raises:
        JobFailed: a rank failed.
    """
    model = make_model(layout.model, models)
    jobs = {
        name: train(layout, model, folder / name, data, lora=lora, through_byteps=ours)
        for name, ours in (("byteps", True), ("all-reduce", False))
    }
    ours = jobs["byteps"]
    seen = ours.results()
    written = ours.folder / AFTER
    logits = next(one.logits for one in seen if one.logits is not None)
    adapter = None
    if lora:
        adapter = _difference(logits, _reference(folder / "peft", model, written / ADAPTER))
    sums = [total for one in seen for step in one.training.steps for total in step.sums.values()]
    shared = sum(total.local.numel() for total in sums if len(total.members) > 1)
    return Outcome(
        round_trip=same(model, ours.folder / BEFORE),
        moved=not same(model, written),
        equal=same(written, jobs["all-reduce"].folder / AFTER),
        logits=_difference(logits, _reference(folder / "transformers", written)),
        adapter_logits=adapter,
        bucketed=sum(s.local.numel() for s in sums) / (STEPS * sum(one.trained for one in seen)),
        pushed=sum(one.training.pushed_bytes for one in seen) / (4 * shared),
        trained=_trained(seen),
        frozen_changed=[name for one in seen for name in one.frozen_changed],
        without_gradient=[name for one in seen for name in one.without_gradient],
    )


def _trained(seen: Sequence[Any]) -> float:
    return sum(one.trained for one in seen) / sum(
        value.numel() for one in seen for value in one.training.parameters.values()
    )


def _reference(folder: Path, model: Path, adapter: Path | None = None) -> Any:
    settings = {"model": str(model), "adapter": str(adapter) if adapter else None}
    job = Job(folder, f"{PROGRAMS}:reference_logits", 1, settings)
    job.run()
    return job.result(0)


def _difference(logits: Any, reference: Any) -> float:
    known = logits[..., : reference.shape[-1]]
    return float((known - reference).abs().max() / reference.abs().max())
