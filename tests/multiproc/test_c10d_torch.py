"""A BytePS group over gloo behaves like gloo: each case on both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import RUN_S, Cluster
from tests.multiproc.test_c10d import FLAT

# Short tensors go through the servers too.
ALL = {**FLAT, "BYTEPS_C10D_MIN_BYTES": "1"}


PROGRAMS = ("as_torch_promises", "compiled", "limits", "group_limit", "profile_shapes")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_group_does_what_torch_promises(
    make_cluster: Callable[..., Cluster], program: str
) -> None:
    make_cluster(workers=2, servers=1, env=ALL).run(f"c10d_torch:{program}")


def test_the_limit_of_the_default_group(make_cluster: Callable[..., Cluster]) -> None:
    """The timeout of init_process_group applies to waits without one, and the error names the
    absent rank."""
    cluster = make_cluster(workers=2, servers=1, env=ALL)
    late, absent = cluster.start("c10d_torch:job_limit")
    assert late.wait(RUN_S) == 1
    assert "lacks the push of worker 1 after 3.0 s" in late.text
    cluster.go("end")
    assert absent.wait(RUN_S) == 1


def test_shapes_are_compared(make_cluster: Callable[..., Cluster]) -> None:
    env = {**ALL, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    make_cluster(workers=2, servers=1, env=env).run("c10d_torch:detailed")


def test_ranks_of_a_host_do_what_torch_promises(make_cluster: Callable[..., Cluster]) -> None:
    env = {**ALL, "BYTEPS_C10D_BACKEND": "node-first"}
    make_cluster(workers=4, servers=1, env=env).run("c10d_torch:as_torch_promises", per_host=2)
