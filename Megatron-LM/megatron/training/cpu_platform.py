# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Run the training loop on a machine without a GPU.

Megatron's training loop is written for CUDA: it asks ``torch.cuda`` for the current device,
streams, memory statistics and the random number generator, and makes small tensors with
``device="cuda"``. This module replaces those parts with CPU equivalents, and sets defaults that
work on a CPU for arguments that choose CUDA-only code. Model, data, optimizer and loop are
Megatron's own, over gloo.

``MEGATRON_CPU=1`` enables it. Nothing enables it automatically: on a node with a broken driver
Megatron must stop with its message about CUDA, instead of training on its CPU while other nodes
wait.

``megatron.training.arguments.parse_args`` calls this module at two places: :func:`set_defaults`
before it parses the command line, and :func:`start` afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["VARIABLE", "install", "is_active", "is_wanted", "set_defaults", "start", "stop"]

VARIABLE = "MEGATRON_CPU"

_CPU = torch.device("cpu")


# --------------------------------------------------------------------------- on or off


def is_wanted() -> bool:
    """Return whether the variable asks for training on the CPU.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE}={text!r}: use 1 to train on the CPU, and 0 or nothing to train on GPUs"
        )
    return text == "1"


def is_active() -> bool:
    """Return whether the replacements are installed."""
    return bool(_replaced)


# --------------------------------------------------------------------------- arguments


@dataclass(frozen=True, kw_only=True)
class _Default:
    """Argument whose usual default needs a GPU, or a library for one."""

    attribute: str
    value: Any
    flag: str
    """Flag that contradicts the default, for the error message."""
    also: tuple[Any, ...] = ()
    """Other values that also work on the CPU."""


def _required_defaults() -> tuple[_Default, ...]:
    from megatron.core.transformer.enums import AttnBackend

    return (
        _Default(attribute="distributed_backend", value="gloo", flag="--distributed-backend"),
        _Default(attribute="transformer_impl", value="local", flag="--transformer-impl"),
        _Default(
            attribute="attention_backend",
            value=AttnBackend.unfused,
            flag="--attention-backend",
            also=(AttnBackend.local,),  # the value that --spec local needs
        ),
        _Default(attribute="use_cpu_initialization", value=True, flag="--use-cpu-initialization"),
        _Default(attribute="no_persist_layer_norm", value=True, flag="--no-persist-layer-norm"),
        _Default(
            attribute="gradient_accumulation_fusion",
            value=False,
            flag="--no-gradient-accumulation-fusion",
        ),
        _Default(attribute="masked_softmax_fusion", value=False, flag="--no-masked-softmax-fusion"),
        _Default(attribute="bias_gelu_fusion", value=False, flag="--no-bias-gelu-fusion"),
        _Default(attribute="bias_swiglu_fusion", value=False, flag="--no-bias-swiglu-fusion"),
        _Default(attribute="bias_dropout_fusion", value=False, flag="--no-bias-dropout-fusion"),
        _Default(attribute="apply_rope_fusion", value=False, flag="--no-rope-fusion"),
        _Default(attribute="disable_jit_fuser", value=True, flag="--disable-jit-fuser"),
        _Default(attribute="cuda_graph_impl", value="none", flag="--cuda-graph-impl"),
    )


def set_defaults(parser: ArgumentParser) -> None:
    """Set CPU defaults for arguments whose usual defaults need a GPU, if training runs on
    the CPU."""
    if is_wanted():
        parser.set_defaults(**{d.attribute: d.value for d in _required_defaults()})


def start(args: Namespace) -> None:
    """Check the parsed arguments and install the replacements, if training runs on the CPU.

    Raises:
        ValueError: an explicit argument needs a GPU.
    """
    if not is_wanted():
        return
    for default in _required_defaults():
        value = getattr(args, default.attribute, default.value)
        if value != default.value and value not in default.also:
            shown = getattr(value, "name", value)
            raise ValueError(
                f"{default.flag} {shown} needs a GPU, and training runs on the CPU "
                f"({VARIABLE}=1): leave out {default.flag}"
            )
    if not is_active():
        install()
        if args.rank == 0:
            chosen = " ".join(
                f"{d.attribute}={getattr(d.value, 'name', d.value)}" for d in _required_defaults()
            )
            print(f"> training on the CPU ({VARIABLE}=1), with {chosen}", flush=True)
    _allow_layouts(args)


def _allow_layouts(args: Namespace) -> None:
    """Make Megatron's local layers, which a CPU needs, accept split sequences, if the arguments
    split them."""
    split, parallel = args.context_parallel_size > 1, args.sequence_parallel
    if not (split or parallel):
        return
    from megatron.training import cpu_layers

    if split:
        cpu_layers.allow_context_parallel()
    if parallel:
        cpu_layers.allow_sequence_parallel()


# --------------------------------------------------------------------------- replacements


class _Stream:
    """Stand-in for a CUDA stream. The CPU works in the order of calls, so nothing has to be
    ordered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _Event:
    """Stand-in for a CUDA event. On the CPU an event has happened when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


_STREAM = _Stream()


def _stream_context(stream: object) -> contextlib.nullcontext[None]:
    # torch's stream context may be entered more than once, and so may this one.
    return contextlib.nullcontext()


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing. Each name needs its own, because torch.compile has
    rules by function, and refuses a function that it finds under names with different rules."""
    return lambda *args, **kwargs: None


def _zero() -> Callable[..., int]:
    """Return a new function that returns 0."""
    return lambda *args, **kwargs: 0


def _memory(device: object = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _get_rng_state(device: object = None, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = None, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    # torch.manual_seed would also seed the GPUs, through the functions that are replaced here.
    torch.default_generator.manual_seed(seed)


def _iterate_data(self: DataLoader) -> Any:
    # A new iterator draws a seed from the CPU's generator, which dropout uses, too. So the
    # generator's state is restored. Otherwise a resumed run, which makes new iterators, would
    # differ from an uninterrupted one.
    state = torch.get_rng_state()
    try:
        return _dataloader_iter(self)
    finally:
        torch.set_rng_state(state)


_dataloader_iter = DataLoader.__iter__


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function. CUDA devices in its arguments become the CPU, and pinning, which needs a
    GPU's driver, is dropped."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        # Pinned memory is for copies to a GPU, and only CUDA has it.
        kwargs.pop("pin_memory", None)
        return function(*(_CPU if _is_cuda(arg) else arg for arg in args), **kwargs)

    return wrapper


def _of_two_widths(make: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of Megatron's own attention so that values may have another width than
    keys, as in latent attention. The constructor leaves that to Transformer Engine; the forward
    pass accepts any width."""

    @functools.wraps(make)
    def wrapper(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        if k_channels is None or v_channels is None:
            make(self, config, *args, **kwargs)
            return
        of_keys = copy.copy(config)
        of_keys.kv_channels = k_channels
        make(self, of_keys, *args, **kwargs)
        self.config = config
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return wrapper


class _All:
    """Handle of several operations in flight."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _of_any_size(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all-gather so that tensors may differ in size, which NCCL allows but gloo does not.
    Megatron's optimizers that update whole layers need this."""

    @functools.wraps(all_gather)
    def wrapper(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: torch.distributed.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if len({each.numel() for each in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        works = [
            torch.distributed.broadcast(each, group=group, group_src=source, async_op=True)
            for source, each in enumerate(tensor_list)
            if each.numel()
        ]
        if async_op:
            return _All(works)
        _All(works).wait()
        return None

    return wrapper


def _write_checkpoints(*args: Any) -> None:
    """Run the main loop of the process that writes checkpoints. The loop expects a GPU number."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    torch.cuda.device_count = lambda: 1
    next(original for owner, _, original in _replaced if owner is PersistentAsyncCaller).__func__(
        *args
    )


def _counts_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert token counts as the alltoall dispatcher of experts does for GPU tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _copied(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Copy the tensors to be written, because training goes on and changes the model in CPU
    memory."""
    return [
        (name, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
        for name, key, (objects, tensors) in write_buckets
    ]


# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor",
    "zeros", "zeros_like",
)
# fmt: on


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield each replaced attribute: its owner, its name and its new value."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import token_dispatcher

    cuda = torch.cuda
    # The device. is_available() stays false, so that PyTorch's own code takes its CPU paths.
    yield cuda, "is_available", lambda: False
    yield cuda, "device_count", _zero()
    yield cuda, "current_device", lambda: _CPU
    yield cuda, "set_device", _nothing()
    # Megatron requires CUDA settings by architecture. The newest one requires none.
    yield cuda, "get_device_properties", lambda device=None: SimpleNamespace(major=10, minor=0)
    yield cuda, "get_device_capability", lambda device=None: (10, 0)
    # Streams and events: the CPU works in order.
    yield cuda, "Stream", _Stream
    yield cuda, "Event", _Event
    yield cuda, "current_stream", lambda device=None: _STREAM
    yield cuda, "default_stream", lambda device=None: _STREAM
    yield cuda, "stream", _stream_context
    yield cuda, "set_stream", _nothing()
    yield cuda, "synchronize", _nothing()
    yield torch.Tensor, "record_stream", _nothing()
    # The CPU has no caching allocator to empty.
    yield cuda, "empty_cache", _nothing()
    yield cuda, "memory_stats", lambda device=None: {}
    yield cuda, "mem_get_info", _memory
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
    ):
        yield cuda, name, _zero()
    yield cuda, "reset_peak_memory_stats", _nothing()
    # Random numbers: the CPU's generator replaces the GPU's.
    for owner in (cuda, cuda.random):
        yield owner, "get_rng_state", _get_rng_state
        yield owner, "set_rng_state", _set_rng_state
        yield owner, "manual_seed", _manual_seed
        yield owner, "manual_seed_all", _manual_seed
    yield megatron_random, "_get_cuda_rng_state", _get_rng_state
    yield megatron_random, "_set_cuda_rng_state", _set_rng_state
    yield DataLoader, "__iter__", _iterate_data
    # Asynchronous checkpoints. The process that writes them has these replacements, too.
    yield PersistentAsyncCaller, "async_loop", staticmethod(_write_checkpoints)
    start = inspect.getattr_static(PersistentAsyncCaller, "_get_process").__func__
    yield (
        PersistentAsyncCaller,
        "_get_process",
        classmethod(lambda cls, rank, mode="", *nice: start(cls, rank, "fork", *nice)),
    )
    yield FileSystemWriterAsync, "preload_tensors", staticmethod(_copied)
    # Operations that Megatron takes from GPU libraries.
    yield token_dispatcher, "maybe_move_tensor_to_cpu", _counts_on_cpu
    yield DotProductAttention, "__init__", _of_two_widths(DotProductAttention.__init__)
    yield torch.distributed, "all_gather", _of_any_size(torch.distributed.all_gather)
    # Tensors and modules that are moved to the GPU, or created there.
    yield torch.Tensor, "cuda", _itself
    yield torch.Tensor, "pin_memory", _itself
    yield torch.nn.Module, "cuda", _itself
    yield torch.Tensor, "to", _on_cpu(torch.Tensor.to)
    yield torch.nn.Module, "to", _on_cpu(torch.nn.Module.to)
    for name in _FACTORIES:
        yield torch, name, _on_cpu(getattr(torch, name))


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # Megatron warns if code that should use the GPU's generator uses the CPU's. On a CPU the two
    # are the same.
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Install the replacements, once. Programs that do not parse Megatron's arguments call this."""
    if is_active():
        return
    for owner, name, replacement in list(_stand_ins()):
        _replaced.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, replacement)
    # torch.compile compiles Megatron's small fused functions. On the CPU that costs seconds of C++
    # compilation in the first step on every rank, and gains nothing.
    torch.compiler.set_stance("force_eager")
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_worth_logging)


def stop() -> None:
    """Remove the replacements. Tests that run in the same process call this."""
    torch.compiler.set_stance("default")
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(_is_worth_logging)
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
