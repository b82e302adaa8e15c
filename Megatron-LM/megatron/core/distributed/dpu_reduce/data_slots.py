# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Which part of each global batch this rank reads: its place among the ranks of all replicas.

Samplers call these by the names that ``megatron.core.mpu`` has, and of one replica they are its
functions.
"""

from __future__ import annotations

from . import job

__all__ = ["get_data_parallel_rank", "get_data_parallel_world_size"]


def get_data_parallel_rank() -> int:
    """Ranks of replica 0 come first."""
    from ... import parallel_state  # which needs this package

    own = parallel_state.get_data_parallel_rank()
    if job.replicas() == 1:
        return own
    return job.replica() * parallel_state.get_data_parallel_world_size() + own


def get_data_parallel_world_size() -> int:
    """Of all replicas."""
    from ... import parallel_state

    return parallel_state.get_data_parallel_world_size() * job.replicas()
