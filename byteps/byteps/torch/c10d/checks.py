"""Checks of TORCH_DISTRIBUTED_DEBUG=DETAIL: members of a group compare their next collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Checks:
    """torch's own comparison of collectives, extended to those that go through the servers. Native
    collectives and those of servers are one sequence, because members may wrongly take different
    paths."""

    def __init__(self, options: Any) -> None:
        """`options`: torch's _DistributedBackendOptions."""
        inside = dist.distributed_c10d
        prefix = f"{inside.PG_WRAPPER_STORE_PREFIX}:{options.group_id}"
        self._helper = dist.ProcessGroupGloo(
            dist.PrefixStore(prefix, options.store),
            options.group_rank,
            options.group_size,
            timeout=options.timeout,
        )
        # This wrapper compares a collective with those of other members, then runs it among this
        # rank alone.
        self._alone = self.around(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options.timeout))

    @staticmethod
    def of_new_group(options: Any) -> Checks | None:
        """Return the checks of a new group; None if the user has not asked for checks."""
        is_detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
        return Checks(options) if is_detailed else None

    def around(self, native: Any) -> Any:
        """Return a backend that compares a collective, and then runs it on the native backend."""
        return torch._C._distributed_c10d._ProcessGroupWrapper(native, self._helper)

    def check(self, tensor: torch.Tensor, opts: Any) -> None:
        """Check that all members start the same all-reduce, before it goes through the servers.

        Raises:
            RuntimeError: members start different collectives, or some start none in time; torch's
                text names the members and their collectives.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        self._alone.allreduce([tensor], options).wait()
