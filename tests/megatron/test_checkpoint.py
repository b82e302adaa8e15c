"""Checkpoints: a run saved with one backend resumes with the other without a difference. Also tests
which rank saves which part of an optimizer on the servers, and when.

With two ranks all sums are bit-identical, so a resumed run must equal the uninterrupted run with
either backend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.distributed.dpu_reduce import server_checkpoint
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from scripts.prepare_data import Dataset
from tests.layouts.job import Job, data_arguments
from tests.megatron.training_jobs import Trained, assert_same_run, same

Train = Callable[..., Trained]

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000")
TORCH = ("--ckpt-format", "torch")
BYTEPS = ("--use-dpu-reduce",)

CASES = {
    "byteps-then-all-reduce": (BYTEPS, (), ("--bf16",)),
    "all-reduce-then-byteps": ((), BYTEPS, TORCH),
    "byteps-then-all-reduce-sharded": (BYTEPS, (), (*SHARDED, "--overlap-param-gather")),
    "all-reduce-then-byteps-sharded": ((), BYTEPS, (*SHARDED, "--bf16")),
}


@pytest.mark.parametrize(
    ("saves", "resumes", "arguments"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.thorough] if "sharded" in name else [])
        for name, case in CASES.items()
    ],
)
def test_resume(
    train: Train,
    run_dir: Path,
    saves: tuple[str, ...],
    resumes: tuple[str, ...],
    arguments: tuple[str, ...],
) -> None:
    shared = (*arguments, *DROPOUT)
    folder = str(run_dir / "checkpoint")
    whole = train(*shared, *saves, "--save", folder, "--save-interval", "2")
    rest = train(*shared, *resumes, "--load", folder, "--ckpt-step", "2")
    assert rest.losses == whole.losses[2:]
    assert same(rest.gradients, whole.gradients[2:])
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name


SERVERS = (*BYTEPS, "--dpu-optimizer")
MEGATRON = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
OVERFLOWS = str(2**17)
MUON = ("--optimizer", "muon")
# In both layouts the vocabulary is padded to a multiple of 4.
PADDED = ("--make-vocab-size-divisible-by", "4")
SPLIT = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "2")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(("--bf16",), id="bf16", marks=pytest.mark.thorough),
        # The first step overflows. If the loss scale were not restored, the first step after the
        # checkpoint would overflow, too.
        pytest.param(("--fp16", "--initial-loss-scale", OVERFLOWS, "--hysteresis", "1"), id="fp16"),
        pytest.param(
            ("--bf16", *MUON, "--use-distributed-optimizer"),
            id="muon",
            marks=pytest.mark.thorough,
        ),
        # Ranks do not hold rounded fp32 parameters, but sums of rounded differences.
        pytest.param(("--bf16", "--dpu-reduce-wire-dtype", "int4"), id="int4"),
        pytest.param(("--bf16", *MUON), id="whole-muon", marks=pytest.mark.thorough),
    ],
)
def test_the_optimizer_on_the_servers_resumes(
    train: Train, run_dir: Path, dtype: tuple[str, ...]
) -> None:
    """Require that a run resumes with the same bits, and with the checkpoint's learning rate if
    that is requested."""
    few = ("--dpu-reduce-keep-bf16", "4096") if "--dpu-reduce-wire-dtype" in dtype else ()
    shared = (*dtype, *DROPOUT, *SERVERS, *few)
    folder = str(run_dir / "checkpoint")
    whole = train(*shared, "--save", folder, "--save-interval", "2")
    load = ["--load", folder, "--ckpt-step", "2"]
    # Megatron's optimizer refuses another learning rate, even with the flag.
    if "muon" not in dtype:
        load += ["--lr", "1", "--use-checkpoint-opt_param-scheduler"]
    rest = train(*shared, *load)
    assert rest.losses == whole.losses[2:]
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name


@pytest.mark.parametrize(
    ("saves", "resumes"),
    [
        pytest.param(SERVERS, (*MEGATRON, *SPLIT), id="from-servers"),
        pytest.param((*SERVERS, *SPLIT), MEGATRON, id="from-split", marks=pytest.mark.thorough),
        pytest.param((*MEGATRON, *SPLIT), SERVERS, id="to-servers", marks=pytest.mark.thorough),
    ],
)
def test_the_optimizer_moves(
    run_job: Callable[..., Job],
    dataset: Dataset,
    run_dir: Path,
    saves: tuple[str, ...],
    resumes: tuple[str, ...],
) -> None:
    """The optimizer's state moves from servers to Megatron's distributed optimizer and back, in
    another layout."""
    dropout = ("--hidden-dropout", "0", "--attention-dropout", "0")
    # Megatron saves the first layer of an MLP as two tensors.
    plain = (*dropout, *PADDED, "--swiglu", "--global-batch-size", "4")
    folder = str(run_dir / "checkpoint")

    def losses(*arguments: str) -> list[float | None]:
        job = run_job("train", 2, arguments=[*data_arguments(dataset), *plain, *arguments])
        return [step.loss for step in job.result(0).steps]

    whole = losses(*saves, "--save", folder, "--save-interval", "2")
    rest = losses(*resumes, "--load", folder, "--ckpt-step", "2")
    assert len(rest) == 2
    # Without the moments or the step count, the last loss would differ by 0.01.
    assert rest == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.parametrize(
    "how", [(), pytest.param(("--dpu-optimizer",), marks=pytest.mark.thorough)]
)
def test_a_deterministic_run_has_the_same_bits_again(
    train: Train, run_dir: Path, how: tuple[str, ...]
) -> None:
    """Repeated and resumed runs are equal, whichever of three ranks comes last."""
    half = ("--bf16", "--grad-reduce-in-bf16", "--deterministic-mode")
    shared = (*half, *DROPOUT, *BYTEPS, *how, "--clip-grad", "0")
    folder = str(run_dir / "checkpoint")
    save = ("--save", folder, "--save-interval", "2")
    whole = train(*shared, *save, ranks=3, broken="late-0")
    again = train(*shared, ranks=3, broken="late-1")
    assert_same_run(again, whole)
    rest = train(*shared, "--load", folder, "--ckpt-step", "2", ranks=3, broken="late-2")
    assert rest.losses == whole.losses[2:]
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name


# Checkpoints of an optimizer on the servers: which rank saves which part, and when it is written.


SHAPE = (4, 3, 5)
BF16_SERVERS = ("--bf16", "--use-dpu-reduce", "--dpu-optimizer")
IN_BACKGROUND = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), SHAPE, (2, 1, 3, 2)])
def test_boxes_hold_the_range_once_and_in_order(shape: tuple[int, ...]) -> None:
    values = numbered(shape)
    count = values.numel()
    for begin in range(count + 1):
        for end in range(begin, count + 1):
            pieces = [
                values[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten()
                for offset, size in server_checkpoint.boxes(shape, begin, end)
            ]
            assert len(pieces) <= max(1, 2 * len(shape) - 1)
            held = torch.cat([torch.empty(0), *pieces])
            assert held.tolist() == list(range(begin, end))


def in_halves(key: str, data: torch.Tensor, replica: Any, _: None) -> list[ShardedTensor]:
    """Return two tensors, adjacent in the parameter, as gated layers are saved."""
    return [
        ShardedTensor.from_rank_offsets(
            f"{key}.{half}", part, (0, 1, 3), replica_id=replica, prepend_axis_num=1
        )
        for half, part in enumerate(data.chunk(2))
    ]


def in_columns(key: str, data: torch.Tensor, replica: Any, _: None) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(f"{key}.{n}", part, replica_id=replica)
        for n, part in enumerate(data.chunk(2, dim=2))
    ]


REPLICA = (0, 0, 1)
PLAIN = ShardedTensor.from_rank_offsets(
    "plain", numbered(SHAPE), (0, 1, 2), (1, 2, 3), replica_id=REPLICA, prepend_axis_num=1
)
HALVES = ShardedTensorFactory("halves", numbered(SHAPE), in_halves, torch.cat, REPLICA)
COLUMNS = ShardedTensorFactory("columns", numbered(SHAPE), in_columns, torch.cat, REPLICA)


def collected(parts: list[ShardedTensor]) -> dict[str, torch.Tensor]:
    """Return the global tensors, with -1 in missing places."""
    wholes: dict[str, torch.Tensor] = {}
    for part in parts:
        whole = wholes.setdefault(part.key, torch.full(part.global_shape, -1.0))
        target = whole[part.global_slice()]
        assert part.data is not None and (target == -1).all(), "saved twice"
        target.copy_(part.data)
    return wholes


@pytest.mark.parametrize("parameter", [PLAIN, HALVES], ids=["plain", "factory"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 60, 70])
def test_ranks_save_what_one_would(
    parameter: ShardedTensor | ShardedTensorFactory, ranks: int
) -> None:
    """Return all boxes together, for any ranges into which the parameter is cut."""
    values = numbered(SHAPE)
    whole = server_checkpoint.with_values(parameter, "key", values)
    expected = whole.build() if isinstance(whole, ShardedTensorFactory) else [whole]
    size = -(-values.numel() // ranks)
    saved = []
    for begin in range(0, values.numel(), size):
        end = min(begin + size, values.numel())
        boxes = server_checkpoint.saved_boxes(parameter, "key", begin, end)
        assert boxes is not None and sum(p.end - p.begin for p in boxes) == end - begin
        for piece in boxes:
            part = piece.holding(values.flatten()[piece.begin : piece.end])
            assert part.replica_id == (0, 0, 0) and not part.has_regular_grid
            # The tensor owns its memory, so Megatron need not copy it.
            assert part.data.untyped_storage().size() == part.data.numel() * 4
            # Megatron writes parts without a grid with all axes of the whole.
            assert len(part.local_shape) == len(part.global_shape)
            saved.append(part)
    read, wanted = collected(saved), collected(expected)
    assert read.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(read[key], value), key


def test_what_cannot_be_cut_or_is_saved_elsewhere() -> None:
    assert server_checkpoint.saved_boxes(COLUMNS, "key", 0, 10) is None
    assert server_checkpoint.is_saved(PLAIN)
    assert not server_checkpoint.is_saved(replace(PLAIN, replica_id=(0, 1, 0)))
    assert server_checkpoint.own_replica(3) == 0


class Bucket:
    """A bucket of several ranks; its values are their indices, one slot after the other."""

    def __init__(self, parameters: list[torch.Tensor], rank: int, ranks: int) -> None:
        ends = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
        self.places = list(zip(ends, parameters, strict=False))
        self.numel, self.is_first = ends[-1], rank == 0
        size = -(-self.numel // ranks)
        self.owned = [(min(rank * size, self.numel), min(rank * size + size, self.numel))]
        self.local = 0
        self.read_elements = 0

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        self.read_elements += end - begin
        return torch.arange(begin, end, dtype=torch.float32) + slot * self.numel

    def gather(
        self, slot: int, begin: int, end: int, *, wanted: bool = True
    ) -> torch.Tensor | None:
        return self.read(slot, begin, end) if wanted else None


def test_ranks_save_a_bucket() -> None:
    """Every element is saved once, for any parameters; a parameter that cannot be cut is saved as a
    whole."""
    elsewhere = replace(PLAIN, key="elsewhere", data=numbered(SHAPE), replica_id=(0, 1, 1))
    model = {str(n): tensor for n, tensor in enumerate((PLAIN, COLUMNS, HALVES, elsewhere))}
    parameters = [tensor.data for tensor in model.values()]
    count = parameters[0].numel()
    saved: list[Any] = []
    read = []
    for rank in range(3):
        bucket = Bucket(parameters, rank, 3)
        buckets: list[Any] = [bucket]
        state = server_checkpoint.sharded_state(
            buckets, [], model, slots=["param", "m"], steps=1, is_loading=False
        )
        read.append(bucket.read_elements)
        for part in state["param_state"].values():
            saved += part.build() if isinstance(part, ShardedTensorFactory) else [part]
    # Only parameters that cannot be cut are read twice.
    assert sum(read) == (8 + 2) * count
    restored = collected(saved)
    for slot, name in enumerate(("param", "m")):
        for number, (tensor, key) in enumerate(((PLAIN, "plain"), (COLUMNS, "columns"))):
            key = f"optimizer.state.{name}.{key}"
            values = numbered(SHAPE) + number * count + slot * 4 * count
            tensor = server_checkpoint.with_values(tensor, key, values)
            wanted = tensor.build() if isinstance(tensor, ShardedTensorFactory) else [tensor]
            for key, value in collected(wanted).items():
                assert torch.equal(restored.pop(key), value), key


@pytest.mark.thorough
def test_a_stage_that_learns_nothing_saves_nothing(run_job: Callable[..., Job]) -> None:
    """A pipeline stage without trained parameters saves nothing. No other rank waits for this
    stage."""
    job = run_job("core_frozen_stage", 4)
    assert sum(job.result(rank) for rank in (0, 1)) == 0
    assert sum(job.result(rank) for rank in (2, 3)) == 4 * 3 + 3


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, each as a whole."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(checkpoint),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    tensors: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[prefix] = value
        elif isinstance(value, dict):
            for name, entry in value.items():
                collect(f"{prefix}.{name}", entry)

    collect("", state)
    return tensors


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(BF16_SERVERS, id="servers"),
        pytest.param((), id="all-reduce", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_is_written_while_training_goes_on(
    train: Train, run_dir: Path, arguments: tuple[str, ...]
) -> None:
    """The writers wait until another step was made. The checkpoint still has the bits of one that
    is written at once, and a run resumes from it. A rank reads only its part of the servers'
    state."""
    now, later = run_dir / "now", run_dir / "later"
    save = ("--save-interval", "2", "--save")
    plain = train(*arguments)
    at_once = train(*arguments, *save, str(now))
    behind = train(*arguments, *IN_BACKGROUND, *save, str(later), waits=True)
    assert {path.name for path in behind.job.folder.glob("waited.*")} == {"waited.0", "waited.1"}
    assert behind.losses == at_once.losses == plain.losses
    for iteration in ("iter_0000002", "iter_0000004"):
        wanted, written_behind = tensors_of(now / iteration), tensors_of(later / iteration)
        assert written_behind.keys() == wanted.keys()
        assert any("optimizer.state.exp_avg_sq" in name for name in wanted)
        for name, value in wanted.items():
            assert torch.equal(written_behind[name], value), f"{iteration} {name}"
    rest = train(*arguments, "--load", str(later), "--ckpt-step", "2")
    assert rest.losses == plain.losses[2:]
    for name, value in plain.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name
    # Two checkpoints are written. Each has three fp32 values for each parameter of a half.
    wanted_bytes = 2 * 12 * sum(value.numel() for value in plain.parameters.values()) / 2
    for rank in range(2):
        for saved in (at_once, behind):
            read = saved.job.result(rank).pulled_bytes - plain.job.result(rank).pulled_bytes
            assert read == pytest.approx(wanted_bytes if arguments else 0, rel=0.02)
