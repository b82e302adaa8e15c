# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""This rank's data-parallel rank and size, counted over all replicas.

Samplers use the two numbers to choose this rank's part of a global batch. The functions have the
names of those in ``megatron.core.mpu``. With a single replica, both return the same.
"""

from __future__ import annotations

from . import job

__all__ = ["get_data_parallel_rank", "get_data_parallel_world_size"]


def get_data_parallel_rank() -> int:
    """Return the data-parallel rank among all replicas. Ranks of replica 0 come first."""
    # The import is here, because parallel_state imports this package.
    from ... import parallel_state

    own = parallel_state.get_data_parallel_rank()
    if job.replicas() == 1:
        return own
    return job.replica() * parallel_state.get_data_parallel_world_size() + own


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks of all replicas."""
    from ... import parallel_state

    return parallel_state.get_data_parallel_world_size() * job.replicas()
