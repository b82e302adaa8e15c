"""FSDP2 in few bits: gradients through the servers, and parameters gathered in 8 bits.

A script that is not changed for this needs BYTEPS_C10D=1 and BYTEPS_FSDP_DTYPES in its environment;
other scripts call `apply`. Only FSDP2's own reduce-scatters and all-gathers change. Other
collectives of the same process groups, such as those that collect a checkpoint, stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from byteps.torch import c_lib, session, wire
from byteps.torch.c10d import scatters
from byteps.torch.c10d.reductions import SUMMED, Settings, joined, tell
from byteps.torch.c10d.replaced import replace_method
from byteps.torch.figures import setting
from byteps.torch.routes import COLLECTIVE, Decision
from byteps.torch.wire import WireType
from torch._compile import _disable_dynamo

NONE = "none"
"""Value of a setting: these collectives stay with NCCL or gloo."""
_FIRST = "2.9"
"""First version of torch whose FSDP2 has the hooks that this module needs."""
_GATHERED = (torch.float32, torch.bfloat16, torch.float16)

_logger = logging.getLogger(__name__)
_advised: list[bool] = []

Call = Callable[..., Any]


def apply(model: torch.nn.Module, *, wire_dtype: str = "int8", gather_dtype: str = NONE) -> None:
    """Make the FSDP2 modules of a model reduce gradients through the servers.

    All ranks call this once, after `fully_shard` and `bps.init()`. Gradients stay with NCCL or gloo
    if their group is on a single host, or if servers would not be faster. BYTEPS_C10D_BACKEND and
    BYTEPS_C10D_MIN_BYTES influence this choice, as for all-reduces.

    Args:
        model: a model that has modules to which `fully_shard` was applied.
        wire_dtype: type in which gradients travel: "same" (their own), "bf16", "fp16", "int8" or
            "int4". Servers add in fp32 and round once. "none": gradients stay with NCCL or gloo.
        gather_dtype: type in which parameters that are gathered over hosts travel. "int8": blocks
            of 128 values of 8 bits. Layers then compute with the rounded parameters; optimizers
            keep the exact ones. "none": the parameters' own type.

    Raises:
        BytePSError: torch is too old for this, and the text names its version; or this process is
            in no job.
        ValueError: a type does not exist, or the model has no FSDP2 module.
    """
    _demand("same", wire_dtype, ("same", NONE, *wire.NAMES))
    _demand("int8", gather_dtype, (NONE, "int8"))
    scatter, gather = _natives()
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("the model has no module of FSDP2: call fully_shard on its modules first")
    session.launched()
    scatter, gather = _copy(scatter), _copy(gather)
    _serve(scatter, gather, wire_dtype, gather_dtype)
    for module in sharded:
        if wire_dtype != NONE:
            module.set_custom_reduce_scatter(scatter())
        if gather_dtype != NONE:
            module.set_custom_all_gather(gather())


def _demand(like: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ValueError(f"{given!r} is no type such as {like!r}: it can be {', '.join(known)}")


def is_asked() -> bool:
    """Return whether BYTEPS_FSDP_DTYPES is set."""
    return c_lib.is_set("BYTEPS_FSDP_DTYPES")


def was_advised() -> bool:
    """Return whether this process has logged that FSDP2's gradients do not use the servers."""
    return bool(_advised)


def install() -> None:
    """Apply BYTEPS_FSDP_DTYPES to all FSDP2 modules of this process. A second call does nothing.

    If the variable is not set, rank 0 logs this once, when FSDP2 reduces gradients over hosts.

    Raises:
        BytePSError: torch is too old for this; the text names its version.
    """
    if not is_asked():
        # With too old a torch the advice would be of no use.
        with contextlib.suppress(session.BytePSError):
            replace_method(_natives()[0], "__call__", _advise)
        return
    wire_dtype, _, gather_dtype = setting("BYTEPS_FSDP_DTYPES", str).partition(",")
    if (wire_dtype, gather_dtype) != (NONE, ""):
        _serve(*_natives(), wire_dtype, gather_dtype or NONE)


def _serve(scatter: type, gather: type, wire_dtype: str, gather_dtype: str) -> None:
    """Make the objects of two classes call this module. The classes are torch's own, or copies of
    them."""
    if wire_dtype != NONE:
        ours = functools.partial(reduce_scatter, wire_dtype=wire_dtype)
        replace_method(scatter, "__call__", ours)
    if gather_dtype != NONE:
        replace_method(gather, "__call__", all_gather)


@_disable_dynamo
def _advise(
    native: Call,
    owner: object,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Run a reduce-scatter by `native`. Log once, on rank 0, that it does not use the servers."""
    if (
        not _advised
        and session.is_initialized()
        and session.rank() == 0
        and scatters.spans_hosts(group)
    ):
        _advised.append(True)
        _logger.warning(
            "BYTEPS_C10D=1 alone gains nothing for FSDP2, whose reduce-scatters stay with NCCL or "
            "gloo: set BYTEPS_FSDP_DTYPES on all hosts, to int8 for gradients, int8,int8 for "
            "parameters too, or none to keep them there"
        )
    return native(owner, output_tensor, input_tensor, group, *arguments, **named)


def _copy(native: type) -> Any:
    """Return a class that behaves as torch's own class did before `install`. torch takes objects of
    this class for a user's, and does not replace them."""
    call = inspect.unwrap(vars(native)["__call__"])
    return type(native.__name__, native.__bases__, {"__call__": call})


def _natives() -> tuple[Any, Any]:
    """Return torch's own classes for FSDP2's reduce-scatters and all-gathers."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        for hook in ("set_custom_reduce_scatter", "set_custom_all_gather"):
            if not hasattr(FSDPModule, hook):
                raise AttributeError(f"FSDPModule has no {hook}")
        return collectives.DefaultReduceScatter, collectives.DefaultAllGather
    except (ImportError, AttributeError) as error:
        raise session.BytePSError(
            f"torch {torch.__version__} has no hooks for the collectives of FSDP2 ({error}): use "
            f"{_FIRST} or later, or unset BYTEPS_FSDP_DTYPES"
        ) from None


@_disable_dynamo
def reduce_scatter(
    native: Call,
    owner: object,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any,
    async_op: bool = False,
    *,
    wire_dtype: str,
) -> Any:
    """Run a reduce-scatter of FSDP2: through the servers if that is faster, otherwise by `native`.

    `native` is torch's method, which this function replaces, and `owner` is its object, one per
    FSDP2 module. The other arguments are those of torch's reduce_scatter_tensor. The input's values
    are undefined afterwards.

    Raises:
        BytePSError: the job failed, and the text names the peer.
    """
    average, factor = _read(op)
    work = None
    if average is not None and session.is_initialized():
        settings = Settings(
            backend=setting("BYTEPS_C10D_BACKEND", str),
            min_bytes=setting("BYTEPS_C10D_MIN_BYTES", int),
            wire_dtype=wire_dtype,
        )
        work = scatters.of_group(group, settings, input_tensor.device).begin_scatter(
            output_tensor, input_tensor, average=average, factor=factor, owner=owner
        )
    if work is None:
        return native(owner, output_tensor, input_tensor, group, op, async_op)
    if async_op:
        return work
    # On a GPU only the current stream waits, not the host.
    work.wait()
    return None


def _read(op: Any) -> tuple[bool | None, float]:
    """Return whether an operation averages, and the factor by which it first multiplies values.
    None: the operation is neither a sum nor an average."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return True, 1.0
    if kind == dist.ReduceOp.SUM:
        return False, 1.0
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return (False, float(factor)) if isinstance(factor, (int, float)) else (None, 1.0)
    return None, 1.0


@_disable_dynamo
def all_gather(
    native: Call,
    owner: object,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    """Run an all-gather of FSDP2 by `native`, in blocks of 8 bits if the group spans hosts.

    All ranks, including the owner of a shard, compute with the same rounded values.
    """
    if (
        not session.is_initialized()
        or input_tensor.dtype not in _GATHERED
        or input_tensor.numel() == 0
        or output_tensor.nbytes < setting("BYTEPS_C10D_MIN_BYTES", int)
        or not scatters.spans_hosts(group)
    ):
        return native(owner, output_tensor, input_tensor, group, async_op)
    form = wire.int8()
    _tell_of_gathers(tuple(dist.get_process_group_ranks(group)), input_tensor.dtype)
    # FSDP2 waits for any work that it is given before it copies the parameters. On a CPU it gathers
    # the next layer's parameters ahead. If that gather blocked the host, it would hide nothing.
    is_awaited_later = async_op or not input_tensor.is_cuda
    with torch.no_grad():
        sent = form.empty(input_tensor.numel(), input_tensor.device)
        received = sent.new_empty(group.size() * sent.numel())
        wire.encode(input_tensor.view(-1), form, sent)
        gathering = native(owner, received, sent, group, is_awaited_later)
    work = _Gathering(gathering, received, form, output_tensor.view(-1), group.size())
    if is_awaited_later:
        return work
    work.wait()
    return None


@functools.lru_cache(maxsize=64)
def _tell_of_gathers(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    """Log once, on the lowest rank, in which type parameters are gathered, and what that saves."""
    hosts = joined().hosts
    part = wire.int8().nbytes(wire.BLOCK) / (wire.BLOCK * dtype.itemsize)
    tell(
        "all-gathers",
        ranks,
        tuple(hosts[rank] for rank in ranks),
        dtype,
        Decision(route=COLLECTIVE, why=f"in {part:.2f} of the bytes", loads={}, seconds={}),
        Settings(backend=COLLECTIVE, min_bytes=1, wire_dtype="int8"),
    )


class _Gathering(dist._Work):
    """All-gather in flight. Its values are decoded when `wait` is called."""

    def __init__(
        self, native: Any, received: torch.Tensor, form: WireType, output: torch.Tensor, size: int
    ) -> None:
        super().__init__()
        self._native = native
        self._received: torch.Tensor | None = received
        self._form = form
        self._output = output
        self._size = size

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the native work does, and decode in the current stream. A second call does
        nothing."""
        received, self._received = self._received, None
        if received is None:
            return True
        if self._native is not None:
            self._native.wait() if timeout == timedelta(0) else self._native.wait(timeout)
        if received.is_cuda:  # This memory belongs to the stream that has started the all-gather.
            received.record_stream(torch.cuda.current_stream(received.device))
        with torch.no_grad():
            for blocks, values in zip(
                received.chunk(self._size), self._output.chunk(self._size), strict=True
            ):
                wire.decode(blocks, self._form, values)
        return True


assert set(_GATHERED) <= SUMMED
