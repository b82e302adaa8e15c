"""Ranks with GPUs, on a node that says that it has some: what Ray does with them needs none."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.ray_failures.cases import ENVIRONMENT
from bench.ray_failures.nodes import Nodes
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings
from tests.layouts.under_ray.gpus import gpus_to_offer, take_a_share

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "BYTEPS_LOCAL_RANK")
names += ("NCCL_HOSTID",)
seen = {n: os.environ.get(n) for n in names}
# The parent is the fork server. It has imported torch, and not what may ask for GPUs.
seen["imported here"] = sys.modules["counting"].PID == os.getpid()
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""


@pytest.mark.parametrize(
    ("mask", "share", "local_ranks", "machines"),
    [
        ("4,5", 1.0, ["0", "1"], 0),
        ("GPU-5f3a,GPU-77b0", 1.0, ["0", "1"], 0),
        ("MIG-5f3a,MIG-77b0", 1.0, ["0", "1"], 2),
        ("6", 0.5, ["0", "0"], 2),
    ],
    ids=["numbers", "names", "slices", "shared"],
)
def test_each_rank_has_a_gpu_and_imports_after_the_fork(
    mask: str, share: float, local_ranks: list[str], machines: int, pool: Pool, run_dir: Path
) -> None:
    del pool  # whose cluster gets another node
    (run_dir / "script.py").write_text(SCRIPT)
    (run_dir / "counting.py").write_text("import os\nPID = os.getpid()\n")
    settings = Settings(
        entry=str(run_dir / "script.py"),
        arguments=(str(run_dir),),
        servers=0,
        cpus_per_rank=0.5,
        gpus_per_rank=share,
        folder=run_dir / "job",
        environment={n: v for n, v in ENVIRONMENT.items() if n != "CUDA_VISIBLE_DEVICES"},
        python_path=(str(run_dir),),
        preload=("torch", "counting"),
    )
    nodes = Nodes(run_dir / "nodes")
    gpus = mask.count(",") + 1
    try:
        nodes.add(cpus=1, gpus=gpus, mask=mask)
        Job(settings, lambda event: None).run()
    finally:
        nodes.close()
    seen = [json.loads((run_dir / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["RANK"] for one in seen] == ["0", "1"]
    # GPUs are numbered as CUDA does it in a process that sees all that Ray may give away.
    assert sorted(one["LOCAL_RANK"] for one in seen) == local_ranks
    assert {one["LOCAL_WORLD_SIZE"] for one in seen} == {str(gpus)}
    assert {one["CUDA_VISIBLE_DEVICES"] for one in seen} == {mask}
    assert [one["BYTEPS_LOCAL_RANK"] for one in seen] == ["0", "1"]
    assert len({one["NCCL_HOSTID"] for one in seen} - {None}) == machines
    assert all(one["imported here"] for one in seen)


@pytest.mark.parametrize(
    ("gpus", "number", "of", "found"),
    [
        (4, 3, 4, {"LOCAL_RANK": "3"}),
        (1, 0, 1, {"LOCAL_RANK": "0"}),
        (1, 2, 4, {"LOCAL_RANK": "0", "NCCL_HOSTID": "machine2"}),
        (2, 1, 3, {"LOCAL_RANK": "1", "NCCL_HOSTID": "machine0"}),
        (2, 2, 3, {"LOCAL_RANK": "0", "NCCL_HOSTID": "machine1"}),
    ],
)
def test_ranks_share_gpus_where_there_are_too_few(
    gpus: int, number: int, of: int, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    monkeypatch.setenv("MEGATRON_CPU", "0")
    monkeypatch.setenv("LOCAL_RANK", str(number))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    take_a_share()
    names = ("LOCAL_RANK", "NCCL_HOSTID")
    assert {name: os.environ[name] for name in names if name in os.environ} == found


def test_a_cluster_offers_gpus_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = Settings(entry="train.py", ranks=2, spares=1)
    assert gpus_to_offer(settings) is None
    assert gpus_to_offer(replace(settings, gpus_per_rank=1.0)) == 3
    assert gpus_to_offer(replace(settings, gpus_per_rank=1.0, spares=0)) is None
