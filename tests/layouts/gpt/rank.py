"""Rank program that records the sums of gradients in Megatron's training loop."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pretrain_dpu_gpt
import torch
import torch.distributed as dist
from megatron.core.datasets import gpt_dataset
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.training import training
from megatron.training.cpu_layers import allow_context_parallel, allow_sequence_parallel

from . import models
from .exact import ExactBits, ExactUpdates
from .layout import RankSeen, Step, Sum
from .models import allow_precision_aware_optimizer, fuse_output_layer, pack
from .rows import Family


class Witness:
    """Records each step of Megatron's loop at full precision.

    The buckets are read when Megatron has finished all sums of a model chunk, before it adds up
    tied embeddings and scales gradients by the number of tokens.
    """

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.names: list[str] = []
        self._steps: list[Step] = []
        self._step = Step()
        self._locals: dict[int, torch.Tensor] = {}
        self.exact: ExactUpdates | None = None
        self.exact_bits: ExactBits | None = None
        self._watches_updates = False
        self._bits_per_host = 0

    def watch(self, *, sums: bool = True) -> None:
        """Record the log and the buckets before and after they are summed.

        Args:
            sums: Record the buckets too, not the log alone.
        """
        self._watch_setup()
        group = param_and_grad_buffer._ParamAndGradBucketGroup
        start, finish = group.start_grad_sync, DistributedDataParallel.finish_grad_sync
        log = training.training_log
        signature = inspect.signature(log)
        witness = self

        def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            for bucket in self.buckets:
                # If the bucket's sum starts a second time in the same step, it is not recorded
                # again, because the bucket has changed by then.
                if id(bucket) not in witness._locals:
                    _wait_for_replays(bucket)
                    scaled = bucket.grad_data * bucket.gradient_scaling_factor
                    witness._locals[id(bucket)] = scaled
            start(self, *args, **kwargs)

        def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            finish(self, *args, **kwargs)
            witness._chunk_done(self)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(*args, **kwargs).arguments
            loss = values["loss_dict"].get("lm loss")
            norm = values["grad_norm"]
            witness._step.loss = None if loss is None else float(loss.item())
            witness._step.grad_norm = None if norm is None else float(norm)
            zeros = values["num_zeros_in_grad"]
            witness._step.zeros = None if zeros is None else int(zeros)
            witness._steps.append(witness._step)
            witness._step, witness._locals = Step(), {}
            return log(*args, **kwargs)

        if sums:
            group.start_grad_sync = start_grad_sync
            DistributedDataParallel.finish_grad_sync = finish_grad_sync
        training.training_log = training_log

    def watch_updates(self) -> None:
        """Repeat each update in fp64."""
        self._watches_updates = True

    def watch_bits(self, per_host: int) -> None:
        """Repeat each update by gradients in few bits, to the bit."""
        self._bits_per_host = per_host

    def _watch_setup(self) -> None:
        setup = training.setup_model_and_optimizer
        witness = self

        @functools.wraps(setup)
        def set_up(*args: Any, **kwargs: Any) -> Any:
            built = setup(*args, **kwargs)
            witness.models.extend(built[0])
            summed = [
                (bucket, group)
                for chunk in witness.models
                for _, bucket, group, _ in _buckets(chunk)
            ]
            if witness._bits_per_host:
                witness.exact_bits = ExactBits(built[1], summed, witness._bits_per_host)
            if witness._watches_updates:
                witness.exact = ExactUpdates(built[1], summed, training.get_args().train_iters)
            return built

        training.setup_model_and_optimizer = set_up

    def watch_byteps(self) -> None:
        """Record the name of each push-pull."""
        from byteps.torch import engine

        start = engine.start  # every push-pull starts here

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.names.append(kwargs["name"])
            return start(*args, **kwargs)

        engine.start = noted

    def _chunk_done(self, chunk: Any) -> None:
        number = next((i for i, model in enumerate(self.models) if model is chunk), 0)
        sharded = chunk.ddp_config.use_distributed_optimizer
        names = {parameter: name for name, parameter in chunk.named_parameters()}
        for name, bucket, group, owners in _buckets(chunk):
            result, offset = bucket.grad_data, 0
            if sharded:
                size = result.numel() // owners.size()
                offset = size * owners.rank()
                result = result[offset : offset + size]
            if hasattr(bucket, "dpu_server_buckets"):
                result = result[:0]  # the sum stays on the servers
            self._step.sums[f"chunk{number}/{name}"] = Sum(
                members=tuple(dist.get_process_group_ranks(group)),
                local=self._locals[id(bucket)].cpu(),
                result=result.clone().cpu(),
                offset=offset,
                places={names[p]: index for p, index in bucket.param_to_index.items()},
            )

    def seen(self) -> RankSeen:
        """Collect the results after training."""
        parameters = {
            f"chunk{number}/{name}": _values(value).clone().cpu()
            for number, model in enumerate(self.models)
            for name, value in model.named_parameters()
        }
        return RankSeen(
            steps=self._steps,
            parameters=parameters,
            names=self.names,
            byteps_imported="byteps.torch" in sys.modules,
            pushed_bytes=_counted("byteps_worker_pushed_bytes_total"),
            pulled_bytes=_counted("byteps_worker_pulled_bytes_total")
            - (self.exact.read_bytes if self.exact else 0),
            update_error=(self.exact.error, self.exact.size) if self.exact else None,
            inexact_updates=self.exact_bits.misses if self.exact_bits else None,
        )


def _wait_for_replays(bucket: Any) -> None:
    """Wait for graphs of single layers, which may still write gradients (``--cuda-graph-impl
    local``)."""
    for parameter in bucket.params_list:
        if (event := getattr(parameter, "_cudagraph_wgrad_ready_event", None)) is not None:
            torch.cuda.current_stream().wait_event(event)


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """Get a parameter's values; fp8 parameters are dequantized with their scales."""
    values = parameter.detach()
    return dequantize_fp8_tensor(values) if is_float8tensor(values) else values


def _counted(name: str) -> int:
    """Read a counter of the engine; 0 without BytePS."""
    bps = sys.modules.get("byteps.torch")
    return 0 if bps is None else int(bps.get_metrics()[name])


def _buckets(chunk: Any) -> Iterator[tuple[str, Any, dist.ProcessGroup, dist.ProcessGroup]]:
    """Yield the buckets of a model chunk with their groups.

    Each item has the name, the bucket, the group that sums it, and the group over which the
    distributed optimizer shards it. With several instances the second group is a part of the first.
    """
    for kind, group, buffers in (
        ("dense", chunk.dp_cp_group, chunk.buffers),
        ("expert", chunk.expt_dp_group, chunk.expert_parallel_buffers),
    ):
        for number, buffer in enumerate(buffers):
            for bucket in buffer.buckets:
                name = f"{kind}{number}/bucket{bucket.bucket_id}"
                yield name, bucket, group, buffer.data_parallel_group


def size_of(kind: str, arguments: Sequence[str]) -> int:
    """Get a parallelism's size from the arguments."""
    flag = f"--{kind}-parallel-size"
    return int(arguments[arguments.index(flag) + 1]) if flag in arguments else 1


def train(folder: Path, arguments: Sequence[str], **options: Any) -> RankSeen:
    """Run the entry script with these arguments; see :func:`run`."""
    options.pop("environment", None)  # for the launcher
    return run(arguments, **options)


def run(
    arguments: Sequence[str],
    frozen: str = "",
    broken: Callable[[], None] | None = None,
    exact: bool = False,
    bits_per_host: int = 0,
    packed: bool = False,
    graphed: bool = False,
    family: Family = "gpt",
) -> RankSeen:
    """Train a model of the family and record it with a :class:`Witness`.

    Parameters of a GPT with ``frozen`` in their names do not require gradients. ``broken`` is
    called before the witness is installed, to break the reducer under test. ``exact`` compares each
    update with an update in fp64, and ``bits_per_host`` with the exact bits of an update by
    gradients in few bits, for that many ranks per host. With ``packed``, rows of tokens hold
    several documents. With ``graphed``, sums are not recorded.
    """
    sys.argv = ["pretrain_dpu_gpt.py", *arguments]
    # On a GPU, operations without a deterministic implementation only cause a warning in the log.
    torch.use_deterministic_algorithms(True, warn_only=True)
    witness = Witness()
    if "--sequence-parallel" in arguments:
        allow_sequence_parallel()
    if size_of("context", arguments) > 1:
        allow_context_parallel()
    if "transformer_engine" in arguments:
        fuse_output_layer()
    elif "--use-precision-aware-optimizer" in arguments:
        allow_precision_aware_optimizer()
    if "--mock-data" in arguments:
        # Megatron sorts its 100,000 documents first. This takes longer than a small run.
        gpt_dataset.MockGPTLowLevelDataset.size = 1000
    if broken is not None:
        broken()
    witness.watch(sums=not graphed)
    if exact:
        witness.watch_updates()
    if bits_per_host:
        witness.watch_bits(bits_per_host)
    if "--use-dpu-reduce" in arguments and sys.modules.get("byteps", True) is not None:
        witness.watch_byteps()
    config_of = pretrain_dpu_gpt.gpt_config_from_args

    def freeze(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(frozen not in name)
        return models

    def pack_each(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for model in models:
            pack(model)
        return models

    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        config = config_of(*args, **kwargs)
        if frozen:
            config.pre_wrap_hooks.append(freeze)
        if packed:
            config.pre_wrap_hooks.append(pack_each)
        return config

    pretrain_dpu_gpt.gpt_config_from_args = with_hooks
    if family == "gpt":
        pretrain_dpu_gpt.main()
    else:
        models.main(family)
    return witness.seen()
