"""How programs reach the servers: the backend ``byteps``, and hooks for DDP and FSDP2.

The backend is NCCL or gloo, but for large all-reduces. Hooks need no process group of it: tensors
that stay behind are reduced by the group that the model has.
"""

# Annotations are evaluated here: DDP looks at those of a hook.
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from byteps.torch import session
from byteps.torch.c10d import identity, reductions, work
from byteps.torch.c10d.reductions import Reductions
from byteps.torch.c10d.work import WorkOfMany

_LOOKED_FOR = (
    *("allgather", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall_base", "all_to_all_single", "barrier", "broadcast", "send", "recv"),
)
"""Methods that torch looks for in a subclass, by any version's name. Where there is none it keeps
the GIL while it starts the native operation. That hangs where a thread of gloo holds the lock of
its queue and frees a tensor, for which it needs the GIL."""

_AVERAGES = {dist.ReduceOp.SUM: False, dist.ReduceOp.AVG: True}


class BytePSGroup(dist.ProcessGroup):
    """A process group that carries the native backend of each device.

    What is not defined here falls through to that backend in C++. The default group joins the
    BytePS job when it is made, and leaves it when it is destroyed.
    """

    def __init__(self, options: Any, backend_options: Any, *, asked: str) -> None:
        """
        Args:
            options: torch's _DistributedBackendOptions: store, rank, size, timeout, name, ranks.
            backend_options: of NCCL, as the script gave them; None: the usual ones.
            asked: the backend that the script has asked for.
        """
        # The form with a store cannot be subclassed.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._is_default = not options.global_ranks_in_group
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._size = len(self._ranks)
        self._native: dict[str, Any] = {}
        self._plain = dist.ProcessGroup(options.group_rank, options.group_size)  # type: ignore[call-arg]
        if asked != "nccl":
            self._carry_gloo(options, ["cpu", "cuda"] if asked == "gloo" else ["cpu"])
        if asked != "gloo" and torch.cuda.is_available():
            self._carry_nccl(options, backend_options)
        if self._is_default:
            reductions.join(options.store, options.group_rank, options.group_size)
        self._reductions = Reductions(identity.of_new_group(options.group_id, self._ranks), "group")

    def _carry_gloo(self, options: Any, devices: Sequence[str]) -> None:
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        gloo._set_sequence_number_for_group()
        self._carry(gloo, dist.ProcessGroup.BackendType.GLOO, devices)

    def _carry_nccl(self, options: Any, given: Any) -> None:
        if given is None:
            given = dist.ProcessGroupNCCL.Options()
        given._timeout = options.timeout
        given.global_ranks_in_group = options.global_ranks_in_group
        given.group_name = options.group_id
        store = dist.PrefixStore("nccl/", options.store)
        nccl = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, given)
        nccl._set_sequence_number_for_group()
        self._carry(nccl, dist.ProcessGroup.BackendType.NCCL, ["cuda"])

    def _carry(self, native: Any, kind: Any, devices: Sequence[str]) -> None:
        for device in devices:
            for group in (self, self._plain):
                group._register_backend(torch.device(device), kind, native)
            self._native[device] = native
        for group in (self, self._plain):
            group._set_default_backend(kind)

    # ----- what goes through the servers

    def allreduce(  # type: ignore[override]  # the one form that torch calls
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Reduce one tensor over the group, in place; return the work."""
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        work = self._begin(tensor, opts)
        return self._native_for(tensor).allreduce(tensors, opts) if work is None else work

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce several tensors over the group, in place; return one work for all."""
        opts = opts or dist.AllreduceCoalescedOptions()
        works, others = [], []
        for tensor in tensors:
            work = self._begin(tensor, opts)
            if work is None:
                others.append(tensor)
            else:
                works.append(work)
        if others:
            work = self._native_for(others[0]).allreduce_coalesced(others, opts)
            if not works:
                return work
            works.append(work)
        return WorkOfMany(works, tensors)

    def _begin(self, tensor: torch.Tensor, opts: Any) -> Any:
        """Start it through the servers; None: it does not go there."""
        average = _AVERAGES.get(_kind(opts.reduceOp))
        if average is None or self._size == 1:
            return None
        return self._reductions.begin(tensor, average=average)

    def _native_for(self, tensor: torch.Tensor) -> Any:
        native = self._native.get(tensor.device.type)
        if native is None:
            have = ", ".join(self._native) or "none"
            raise RuntimeError(
                f"the process group has no backend for {tensor.device.type} tensors (it has: "
                f"{have}); name one in init_process_group, such as backend='cpu:gloo,cuda:nccl'"
            )
        return native

    # ----- its name and its end

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return "byteps"

    def shutdown(self) -> None:
        """End the group, and with the default group this worker's part in the job."""
        self._reductions.close()
        try:
            if self._is_default and session.is_initialized():
                work.await_all()
        finally:
            for native in set(self._native.values()):
                native.shutdown()
            if self._is_default:
                session.shutdown()

    def abort(self) -> None:
        """End the group at once: its all-reduces in flight fail."""
        self._reductions.close()
        if self._is_default:
            session.abort("torch.distributed was aborted")
        for native in set(self._native.values()):
            native.abort()


def _plainly(name: str) -> Callable[..., Any]:
    """A method that leaves its work to a group of the native backends, without the GIL."""

    def start(self: BytePSGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._plain, name)(*arguments, **named)

    start.__name__ = name
    return start


for _name in _LOOKED_FOR:
    if hasattr(dist.ProcessGroup, _name):
        setattr(BytePSGroup, _name, _plainly(_name))


def _kind(reduce_op: Any) -> Any:
    """SUM, AVG, ... of what torch gives: a ReduceOp, or one of its kinds."""
    return getattr(reduce_op, "op", reduce_op)


# Hooks of DistributedDataParallel and FSDP2.


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Reductions] = weakref.WeakKeyDictionary()


def ddp_comm_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for ``DistributedDataParallel``: average a bucket over all ranks.

    ``model.register_comm_hook(None, bps.ddp_comm_hook)``. Buckets that later layers wait for first
    go first. Variables BYTEPS_C10D_* say which go through the servers, and in which type.

    Args:
        state: the model's process group; None: the default one.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer, with the averages. It fails with BytePSError where a push
        or a pull does; the text names the peer.
    """
    group = state or dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    work = _start(buffer, group, average=True, priority=-bucket.index())
    if work is not None:
        return work.get_future().then(lambda done: done.value()[0])
    buffer.div_(group.size())
    native = dist.all_reduce(buffer, group=group, async_op=True)
    return native.get_future().then(lambda done: done.value()[0])


def fsdp_all_reduce_hook(group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """A hook for FSDP2's ``module.set_all_reduce_hook``: with a mesh of one dimension, average each
    reduce-scattered gradient over a second one, whose group this is.

    Args:
        group: of ranks that hold the same shard, such as ``mesh.get_group("replicate")``.
    """

    def hook(gradient: torch.Tensor) -> None:
        work = _start(gradient, group, average=True, priority=0)
        if work is not None:
            work.wait()
            return
        gradient.div_(group.size())
        dist.all_reduce(gradient, group=group)

    return hook


def _start(tensor: torch.Tensor, group: Any, *, average: bool, priority: int) -> Any:
    reductions = _known.get(group)
    if reductions is None:
        reductions = _known[group] = Reductions(identity.of_group(group), "hook")
        weakref.finalize(group, reductions.close)
    return reductions.begin(tensor, average=average, priority=priority)
