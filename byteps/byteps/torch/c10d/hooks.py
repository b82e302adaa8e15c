"""Hooks by which DistributedDataParallel and FSDP2 reduce gradients through the servers.

They need no process group of the backend ``byteps``: tensors that stay behind are reduced by the
group that the model has.
"""

# Annotations are evaluated here: DDP looks at those of a hook.
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from byteps.torch.c10d.reductions import Reductions, ranks_of

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
        reductions = _known[group] = Reductions(ranks_of(group), "hook")
        weakref.finalize(group, reductions.close)
    return reductions.begin(tensor, average=average, priority=priority)
