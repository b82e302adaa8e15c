"""A script that trains nothing: three steps, a sum each."""

from __future__ import annotations

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import byteps.torch as bps
from megatron_byteps_ray import report

dist.init_process_group("gloo")
bps.init()
rank = dist.get_rank()
for step in range(1, 4):
    values = torch.arange(1.0, 5.0) * (rank + 1) * step
    bps.push_pull_inplace(values, average=False, name="x")
    report(step, tokens=4, total=values.sum().item())
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
seen = {"sum": values.tolist(), "arguments": sys.argv[1:], **{n: os.environ[n] for n in names}}
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(seen, file)
bps.shutdown()
dist.destroy_process_group()
"""
