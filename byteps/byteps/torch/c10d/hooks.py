"""The backend ``byteps`` of torch.distributed, and hooks for DDP and FSDP2.

The backend sends large all-reduces through the servers, and leaves all other operations to NCCL or
gloo. The hooks work with any process group, which reduces the tensors that do not go through the
servers.
"""

# Annotations must be evaluated here, because DDP checks the annotations of a hook.
import re
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from byteps.c10d_plugin import MIXED, NAME, RequestedBackends, warn_not_carried
from byteps.torch import session
from byteps.torch.c10d import events, identity, reductions, work
from byteps.torch.c10d.checks import Checks
from byteps.torch.c10d.reductions import Reductions
from byteps.torch.c10d.work import NO_LIMIT, Work
from byteps.torch.c10d.work_of_many import WorkOfMany
from torch._compile import _disable_dynamo

_NOT_RECONFIGURED = (
    "a process group that BytePS carries cannot be reconfigured: its members are the workers that "
    "servers count. Destroy it and make another one, or unset BYTEPS_C10D"
)

_NOT_HOOKED = (
    "hooks before and after each collective are not called for the all-reduces that BytePS sends: "
    "register none on a process group that it carries, or unset BYTEPS_C10D"
)

_AVERAGES = {dist.ReduceOp.SUM: False, dist.ReduceOp.AVG: True}


class BytePSGroup(dist.ProcessGroup):
    """A process group that carries the native backend of each device.

    Methods that are not defined here fall through to the native backend in C++. The default group
    joins the BytePS job when it is made, and leaves the job when it is destroyed.
    """

    def __init__(
        self, options: Any, backend_options: Any, *, requested: RequestedBackends | None
    ) -> None:
        """
        Args:
            options: torch's _DistributedBackendOptions: store, rank, size, timeout, name, ranks.
            backend_options: options of NCCL, as the script gave them; None: the defaults.
            requested: the backends that the script has asked for; None: the backend ``byteps``.
        """
        # Subclasses cannot use torch's constructor with a store.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._is_default = not options.global_ranks_in_group
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._size = len(self._ranks)
        self._timeout: timedelta = options.timeout
        self._native: list[Any] = []
        self._devices: list[str] = []
        self._plain = dist.ProcessGroup(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._checks = Checks.of_new_group(options)
        if requested is None:
            requested = RequestedBackends(name=NAME, backends=MIXED)
        self._name = requested.name
        for backend in dict.fromkeys(requested.backends.values()):
            devices = [device for device, of in requested.backends.items() if of == backend]
            if backend == "gloo":
                self._carry_gloo(options, devices)
            elif torch.cuda.is_available() or len(requested.backends) == 1:
                self._carry_nccl(options, backend_options, devices)
        if self._is_default:
            reductions.join(
                options.store, options.group_rank, options.group_size, timeout=options.timeout
            )
            from byteps.torch import fsdp  # fsdp imports this module, too
            from byteps.torch.c10d import ddp

            fsdp.install()
            if reductions.Settings.read().wire_of(torch.float32).feedback:
                ddp.install()
        self._reductions = Reductions(identity.of_new_group(options.group_id, self._ranks), "group")

    def _carry_gloo(self, options: Any, devices: Sequence[str]) -> None:
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        gloo._set_sequence_number_for_group()
        self._carry(gloo, dist.ProcessGroup.BackendType.GLOO, devices)

    def _carry_nccl(self, options: Any, given: Any, devices: Sequence[str]) -> None:
        if given is None:
            given = dist.ProcessGroupNCCL.Options()
        given._timeout = options.timeout
        given.global_ranks_in_group = options.global_ranks_in_group
        given.group_name = options.group_id
        store = dist.PrefixStore("nccl/", options.store)
        nccl = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, given)
        nccl._set_sequence_number_for_group()
        self._carry(nccl, dist.ProcessGroup.BackendType.NCCL, devices)

    def _carry(self, native: Any, kind: Any, devices: Sequence[str]) -> None:
        self._native.append(native)
        self._devices += devices
        backend = native if self._checks is None else self._checks.around(native)
        for group in (self, self._plain):
            for device in devices:
                group._register_backend(torch.device(device), kind, backend)
            group._set_default_backend(kind)

    # ----- operations that may go through the servers

    @_disable_dynamo
    def allreduce(  # type: ignore[override]  # one function for all forms
        self,
        tensors: Sequence[torch.Tensor] | torch.Tensor | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        tensor: torch.Tensor | None = None,
        op: Any = None,
    ) -> Any:
        """Reduce one tensor over the group, in place; return the work.

        Args:
            tensors: one tensor, alone or in a list.
            opts: torch's AllreduceOptions, or the operation.
            timeout: timeout of this operation, if `opts` are no options.
            tensor: the tensor, instead of `tensors`.
            op: the operation, instead of `opts`.
        """
        given = tensor if tensors is None else tensors
        several = [given] if isinstance(given, torch.Tensor) else list(given or ())
        if not isinstance(opts, dist.AllreduceOptions):
            options, kind = dist.AllreduceOptions(), op if opts is None else opts
            if kind is not None:
                options.reduceOp = kind
            if timeout is not None:
                options.timeout = timeout
            opts = options
        if len(several) == 1:
            work = self._recorded(
                "allreduce_", several, opts, lambda: self._begin(several[0], opts)
            )
            if work is not None:
                return work
        self._demand_backends(several)
        return self._plain.allreduce(several, opts)

    @_disable_dynamo
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce several tensors over the group, in place; return one work for all of them."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._recorded(
            "allreduce_coalesced_", tensors, opts, lambda: self._begin_all(tensors, opts)
        )

    def _begin_all(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        works: list[Any] = []
        others = []
        for tensor in tensors:
            work = self._begin(tensor, opts)
            if work is None:
                others.append(tensor)
            else:
                works.append(work)
        if others or not works:
            self._demand_backends(others)
            native = self._plain.allreduce_coalesced(others, opts)
            if not works:
                return native
            works.append(native)
        return WorkOfMany(works, tensors)

    def _recorded(
        self, call: str, tensors: Sequence[torch.Tensor], opts: Any, start: Callable[[], Any]
    ) -> Any:
        """Start an all-reduce through the servers, and record it under a profiler. (The native
        backend records its own all-reduces.)"""
        if not torch.autograd._profiler_enabled() or not any(
            self._takes(tensor, opts) for tensor in tensors
        ):
            return start()
        operation = f"{self._plain.name()}:all_reduce"
        return events.record(f"c10d::{call}", operation, tensors, start)

    def _takes(self, tensor: torch.Tensor, opts: Any) -> bool:
        is_summed = _kind(opts.reduceOp) in _AVERAGES and self._size > 1
        return is_summed and self._reductions.takes(tensor)

    def _begin(self, tensor: torch.Tensor, opts: Any) -> Work | None:
        """Start an all-reduce through the servers. Return None if it does not go through them."""
        average = _AVERAGES.get(_kind(opts.reduceOp))
        if average is None or self._size == 1:
            return None
        if self._checks is not None and self._reductions.takes(tensor):
            self._checks.check(tensor, opts)
        work = self._reductions.begin(tensor, average=average)
        if work is not None:
            own = opts.timeout > NO_LIMIT
            limit = opts.timeout if own else self._timeout
            work.bound(
                limit.total_seconds(),
                "the timeout of this operation" if own else "the timeout of its process group",
            )
        return work

    def _demand_backends(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type not in self._devices:
                have = ", ".join(self._devices) or "none"
                raise RuntimeError(
                    f"the process group has no backend for {tensor.device.type} tensors (it has: "
                    f"{have}); name one in init_process_group, such as "
                    "backend='cpu:gloo,cuda:nccl'"
                )

    # ----- name and end of the group

    def getBackendName(self) -> str:
        """Return the name of the backend, as torch calls this method."""
        return NAME if self._name == NAME else self._plain.name()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations that are started from now on."""
        self._timeout = timeout
        self._plain.set_timeout(timeout)

    def split_group(self, *arguments: Any, **named: Any) -> Any:
        """Return a new group of the native backend, split from this group's native backend."""
        warn_not_carried("a group that split_group makes")
        return self._plain.split_group(*arguments, **named)

    def merge_remote_group(self, *arguments: Any, **named: Any) -> Any:
        """Return a new group of the native backend."""
        warn_not_carried("a group that merge_remote_group makes")
        return self._plain.merge_remote_group(*arguments, **named)

    def bind(self, device: torch.device) -> None:
        """Bind the group to a GPU, on which its collectives will run."""
        self.bound_device_id = self._plain.bound_device_id = device

    @property
    def supports_reconfigure(self) -> bool:
        """Return False: the group cannot be reconfigured, even if the native backend can."""
        return False

    def get_reconfigure_handle(self) -> str:
        """Refuse: the group cannot be reconfigured.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_NOT_RECONFIGURED)

    def reconfigure(self, opts: Any) -> Any:
        """Refuse: the group cannot be reconfigured.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_NOT_RECONFIGURED)

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Refuse: the group supports no hooks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_NOT_HOOKED)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Refuse: the group supports no hooks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_NOT_HOOKED)

    def shutdown(self) -> None:
        """End the group. If it is the default group, this worker also leaves the job."""
        self._reductions.close(waits=True)
        try:
            if self._is_default and session.is_initialized():
                work.await_all()
        finally:
            for native in self._native:
                native.shutdown()
            if self._is_default:
                session.shutdown()

    def abort(self) -> None:
        """End the group at once: its all-reduces in flight fail."""
        self._reductions.close()
        if self._is_default:
            session.abort("torch.distributed was aborted")
        for native in self._native:
            native.abort()


def _plainly(name: str) -> Callable[..., Any]:
    """Return a method that calls the group of the native backends, without holding the GIL."""

    @_disable_dynamo
    def start(self: BytePSGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._plain, name)(*arguments, **named)

    start.__name__ = name
    return start


_STARTS = re.compile(r"-> (c10d::|torch\._C\._distributed_c10d\.)?Work\b")
"""Pattern of torch's methods that start an operation. It matches the signature in their
docstrings."""

_NAMES_IN_CPP = {
    "recvAnysource": "recv_anysource",
    "start_coalescing": "_start_coalescing",
    "end_coalescing": "_end_coalescing",
}
"""Methods that torch's C++ code looks for under another name than Python code does."""


def _start_without_gil() -> None:
    """Define, in BytePSGroup, each method that starts an operation of the native backends.

    torch's C++ code looks for a method of the subclass, and each version of torch adds methods. If
    there is none, the C++ code starts the native operation while it holds the GIL. This deadlocks
    if a thread of gloo holds the lock of gloo's queue, and waits for the GIL to free a tensor.
    """
    for name in dir(dist.ProcessGroup):
        method = getattr(dist.ProcessGroup, name)
        if name not in vars(BytePSGroup) and _STARTS.search(getattr(method, "__doc__", "") or ""):
            setattr(BytePSGroup, name, _plainly(name))
    for looked_for, name in _NAMES_IN_CPP.items():
        setattr(BytePSGroup, looked_for, _plainly(name))


_start_without_gil()


def _kind(reduce_op: Any) -> Any:
    """Return the kind (SUM, AVG, ...) of a ReduceOp. A kind is returned unchanged."""
    return getattr(reduce_op, "op", reduce_op)


# Hooks of DistributedDataParallel and FSDP2.


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Reductions] = weakref.WeakKeyDictionary()


def ddp_comm_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks: a communication hook for ``DistributedDataParallel``.

    Register it by ``model.register_comm_hook(None, bps.ddp_comm_hook)``. The buckets that the next
    forward pass needs first have the highest priority. The variables BYTEPS_C10D_* decide which
    buckets go through the servers, and in which type they travel.

    Args:
        state: the model's process group; None: the default group.
        bucket: the bucket, as DDP passes it.

    Returns:
        A future of the bucket's buffer, with the averages. If a push or a pull fails, the future
        fails with BytePSError; the text names the peer.
    """
    group = state or dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    first = bucket.parameters()[0]
    work = _start(buffer, group, average=True, priority=-bucket.index(), owner=first)
    if work is not None:
        return work.get_future().then(lambda done: done.value()[0])
    buffer.div_(group.size())
    native = dist.all_reduce(buffer, group=group, async_op=True)
    return native.get_future().then(lambda done: done.value()[0])


def fsdp_all_reduce_hook(group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Return a hook for FSDP2's ``module.set_all_reduce_hook``. If FSDP2 shards over a mesh of one
    dimension, the hook averages each reduce-scattered gradient over a second dimension.

    Args:
        group: the ranks that hold the same shard, such as ``mesh.get_group("replicate")``.
    """

    def hook(gradient: torch.Tensor) -> None:
        work = _start(gradient, group, average=True, priority=0, owner=hook)
        if work is not None:
            work.wait()
            return
        gradient.div_(group.size())
        dist.all_reduce(gradient, group=group)

    return hook


def _start(tensor: torch.Tensor, group: Any, *, average: bool, priority: int, owner: object) -> Any:
    reductions = _known.get(group)
    if reductions is None:
        reductions = _known[group] = Reductions(identity.of_group(group), "hook")
        weakref.finalize(group, reductions.close)
    return reductions.begin(tensor, average=average, priority=priority, owner=owner)
