"""Ranks with GPUs, on a node that says that it has some: what Ray does with them needs none."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_byteps_ray.job import Job
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings
from raykit.cases import ENVIRONMENT
from raykit.nodes import Nodes

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
seen = {n: os.environ.get(n) for n in names}
# The parent is the fork server. It has imported torch, and not what may ask for GPUs.
seen["imported here"] = sys.modules["counting"].PID == os.getpid()
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""


def test_each_rank_has_a_gpu_and_imports_after_the_fork(pool: Pool, run_dir: Path) -> None:
    del pool  # whose cluster gets another node
    (run_dir / "script.py").write_text(SCRIPT)
    (run_dir / "counting.py").write_text("import os\nPID = os.getpid()\n")
    settings = Settings(
        entry=str(run_dir / "script.py"),
        arguments=(str(run_dir),),
        servers=0,
        cpus_per_rank=0.5,
        gpus_per_rank=1.0,
        folder=run_dir / "job",
        environment={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0,1"},
        python_path=(str(run_dir),),
        preload=("torch", "counting"),
    )
    nodes = Nodes(run_dir / "nodes")
    try:
        nodes.add(cpus=1, gpus=2)
        Job(settings, lambda event: None).run()
    finally:
        nodes.close()
    seen = [json.loads((run_dir / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["RANK"] for one in seen] == ["0", "1"]
    # GPUs are numbered as on the machine, of which each rank sees all.
    assert {one["LOCAL_RANK"] for one in seen} == {"0", "1"}
    assert {(one["LOCAL_WORLD_SIZE"], one["CUDA_VISIBLE_DEVICES"]) for one in seen} == {
        ("2", "0,1")
    }
    assert all(one["imported here"] for one in seen)
