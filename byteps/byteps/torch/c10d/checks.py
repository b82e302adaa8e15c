"""TORCH_DISTRIBUTED_DEBUG=DETAIL: members compare what they are about to reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Checks:
    """torch's own comparison of collectives, for those of the native backends and for those that go
    through the servers: one sequence of them, since members may differ in that, too."""

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
        # Compares with the others, and then sums over this rank alone.
        self._alone = self.around(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options.timeout))

    @staticmethod
    def of_new_group(options: Any) -> Checks | None:
        """None: the user has not asked for them."""
        is_detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
        return Checks(options) if is_detailed else None

    def around(self, native: Any) -> Any:
        """A backend that compares, and then does what the native one does."""
        return torch._C._distributed_c10d._ProcessGroupWrapper(native, self._helper)

    def check(self, tensor: torch.Tensor, opts: Any) -> None:
        """Compare an all-reduce that goes through the servers.

        Raises:
            RuntimeError: members reduce something else, or did not come in time; torch's text says
                which, and what.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        self._alone.allreduce([tensor], options).wait()
