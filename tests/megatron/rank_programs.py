"""Programs of ranks in tests. Each function is called with the job's folder."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pretrain_dpu_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    dpu_reduce,
    param_and_grad_buffer,
)
from megatron.core.distributed.dpu_reduce import server_checkpoint
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import cpu_platform, training
from torch.distributed.device_mesh import DeviceMesh

from scripts.trainkit.job import read_record
from tests.layouts.gpt.layout import RankSeen
from tests.layouts.gpt.rank import run
from tests.layouts.job import LIMIT_S
from tests.megatron import faults

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2
    --train-iters 4 --lr 1e-2 --split 100,0,0 --eval-iters 0 --eval-interval 1000
    --log-interval 1 --seed 7 --num-workers 0
""".split()  # noqa: SIM905


def train(
    folder: Path,
    arguments: Sequence[str],
    hide_byteps: bool = False,
    broken: str = "",
    environment: dict[str, str] | None = None,
    waits: bool = False,
) -> RankSeen:
    """Run Megatron's training loop with the entry script, on the small model.

    ``hide_byteps`` makes ``import byteps`` fail. ``broken`` names a function of faults.py. With
    ``waits``, checkpoints are written only after another step.
    """
    if hide_byteps:
        sys.modules["byteps"] = None  # type: ignore[assignment] # the import system accepts None
    if waits:
        _write_later(folder)
    broken_by = faults.BREAKS[broken] if broken else None
    return run([*MODEL, *_through_servers(arguments)], broken=broken_by)


def train_with_the_flag_on_rank_0(
    folder: Path, arguments: Sequence[str], environment: dict[str, str]
) -> RankSeen:
    """Run Megatron's training loop. Only rank 0 gets `--use-dpu-reduce`."""
    flag = ["--use-dpu-reduce"] if os.environ["RANK"] == "0" else []
    return run([*MODEL, *arguments, *flag])


def train_with_torch_fsdp2(
    folder: Path, arguments: Sequence[str], environment: dict[str, str]
) -> list[float]:
    """Run Megatron's training loop with FSDP2 on the CPU, where Megatron asks for GPUs. Return the
    loss of each step."""
    of_gpus = DeviceMesh.from_group
    setattr(DeviceMesh, "from_group", lambda group, _: of_gpus(group, "cpu"))  # noqa: B010
    record = folder / "steps.jsonl"
    sys.argv = ["pretrain_dpu_gpt.py", *MODEL, *arguments, "--record-steps", str(record)]
    sys.argv += ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]
    sys.argv += ["--ckpt-format", "torch_dist", "--distributed-backend", "gloo"]
    pretrain_dpu_gpt.main()
    return [step.loss for step in read_record(record).steps]


def _write_later(folder: Path) -> None:
    """Make the process that writes checkpoints wait until this rank has made three steps."""
    writer, log = filesystem_async.FileSystemWriterAsync, training.training_log
    write, steps = writer.write_preloaded_data, 0

    @functools.wraps(log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            (folder / f"third-step.{dist.get_rank()}").touch()
        return log(*args, **kwargs)

    def write_later(*args: Any, **kwargs: Any) -> Any:
        rank = os.environ["RANK"]
        deadline = time.monotonic() + LIMIT_S
        while not (folder / f"third-step.{rank}").exists():
            (folder / f"waited.{rank}").touch()
            assert time.monotonic() < deadline, "training does not go on"
            time.sleep(0.01)
        return write(*args, **kwargs)

    training.training_log = training_log
    writer.write_preloaded_data = staticmethod(write_later)


def _through_servers(arguments: Sequence[str]) -> list[str]:
    """Add a flag for the backend. The ranks share this machine, so without the flag nothing would
    go to servers."""
    if "--use-dpu-reduce" in arguments and "--dpu-reduce-backend" not in arguments:
        return [*arguments, "--dpu-reduce-backend", "flat"]
    return list(arguments)


def train_layout(
    folder: Path,
    arguments: Sequence[str],
    broken: str,
    environment: dict[str, str],
    **options: Any,
) -> RankSeen:
    """Run the parity harness with a broken reducer; `options`: see :func:`run`."""
    return run(arguments, broken=faults.BREAKS[broken], **options)


def compiles(folder: Path) -> tuple[float, int]:
    """Return the result of a compiled function, and the number of its graphs. It runs with the
    CPU's replacements, in a process that has compiled nothing before."""
    cpu_platform.install()
    torch.compiler.set_stance("default")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda values: (values * 2 + torch.zeros(1)).sum(), backend=backend)
    return function(torch.ones(3)).item(), len(graphs)


def train_on_hosts(
    folder: Path, arguments: Sequence[str], hosts: str, environment: dict[str, str]
) -> RankSeen:
    """Train with each rank on the host of its letter in `hosts`."""
    os.environ["BYTEPS_HOST_ID"] = hosts[int(os.environ["RANK"])]
    return run([*MODEL, *arguments])


def train_owed(
    folder: Path, arguments: Sequence[str], environment: dict[str, str]
) -> dict[str, Any]:
    """Return the rounding losses at a checkpoint."""
    # Imported here, because that module imports this one.
    from tests.megatron.recipe_programs import watch

    owed = watch()
    run([*MODEL, *_through_servers(arguments)])
    return {"owed": owed, "tensor_rank": parallel_state.get_tensor_model_parallel_rank()}


def _poison() -> None:
    """Make a gradient of the second rank NaN in the second step, before it is summed."""
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    start = group.start_grad_sync
    steps: Counter[Any] = Counter()

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        steps[self] += 1
        for bucket in self.buckets:
            if dist.get_rank() == 1 and steps[self] == 2 and bucket.offset == 0:
                bucket.grad_data[5] = torch.nan
        start(self, *args, **kwargs)

    group.start_grad_sync = start_grad_sync


def train_poisoned(
    folder: Path, arguments: Sequence[str], environment: dict[str, str] | None = None
) -> RankSeen:
    """Train with a NaN on one rank."""
    return run([*MODEL, *_through_servers(arguments)], broken=_poison)


def train_faulty(
    folder: Path,
    arguments: Sequence[str],
    victim: str = "",
    phase: str = "",
    environment: dict[str, str] | None = None,
) -> RankSeen:
    """Train while a rank or a server is killed; see faults.py."""
    broken = functools.partial(faults.install, folder, victim, phase)
    try:
        return run([*MODEL, *_through_servers(arguments)], broken=broken)
    except BaseException:
        # The servers end with the first rank, so it waits until all ranks have their answers.
        if not victim:
            faults.meet(folder, wait=True)
        raise


def train_without_servers(
    folder: Path, arguments: Sequence[str], victims: Sequence[int], environment: dict[str, str]
) -> RankSeen:
    """Train while servers (pids) are killed, one in each step from the second on."""
    broken = functools.partial(faults.kill_servers, folder, victims)
    return run([*MODEL, *_through_servers(arguments)], broken=broken)


# --------------------------------------------------------------------------- megatron.core alone


class Mixed(torch.nn.Module):
    """Layers of several dtypes, and a layer that belongs to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16, dtype=torch.float32)
        self.second = torch.nn.Linear(16, 12, dtype=torch.bfloat16)
        self.expert = torch.nn.Linear(12, 4, dtype=torch.float32)
        for parameter in self.expert.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined] # Megatron's mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.second(self.first(x).bfloat16()).float())


def _on_core(body: Callable[[], Any], **groups: int) -> Any:
    """Run with torch.distributed and Megatron's groups, without megatron.training."""
    cpu_platform.install()
    # Imported libraries change the log level.
    logging.basicConfig(level=logging.INFO, force=True)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**groups)
    torch.manual_seed(3)
    try:
        return body()
    finally:
        dpu_reduce.shutdown()
        dist.destroy_process_group()


def gathers(folder: Path, sizes: Sequence[int], waits: bool) -> list[torch.Tensor]:
    """All-gather `sizes` numbers of each rank, all equal to the rank plus one."""

    def body() -> list[torch.Tensor]:
        rank = dist.get_rank()
        into = [torch.zeros(size) for size in sizes]
        work = dist.all_gather(into, torch.full((sizes[rank],), rank + 1.0), async_op=waits)
        if waits:
            work.wait()
        return into

    return _on_core(body)


def _wrap(
    module: torch.nn.Module, pg_collection: Any = None, **config: Any
) -> DistributedDataParallel:
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    if config.get("use_dpu_reduce"):
        config.setdefault("dpu_reduce_backend", "flat")
    ddp_config = DistributedDataParallelConfig(**config)
    return DistributedDataParallel(transformer, ddp_config, module, pg_collection=pg_collection)


def core_frozen_stage(folder: Path, environment: dict[str, str] | None = None) -> int:
    """Save a checkpoint before the first step, with a frozen first pipeline stage; return the
    number of this rank's fp32 parameters in it."""

    def body() -> int:
        module = torch.nn.Linear(4, 3)
        module.requires_grad_(parallel_state.get_pipeline_model_parallel_rank() > 0)
        ddp = _wrap(module, use_dpu_reduce=True, dpu_optimizer=True)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1), [ddp])
        if optimizer.is_stub_optimizer:  # Megatron saves nothing of the frozen stage.
            return 0
        model = {
            name: ShardedTensor.from_rank_offsets(name, parameter)
            for name, parameter in ddp.module.named_parameters()
        }
        metadata = {"distrib_optim_sharding_type": server_checkpoint.SHARDING}
        saved = optimizer.sharded_state_dict(model, metadata=metadata)["param_state"]
        return sum(value.data.numel() for name, value in saved.items() if ".param." in name)

    return _on_core(body, pipeline_model_parallel_size=2)


def core_recipe(folder: Path, served: bool) -> dict[str, Any]:
    """Make three steps of a recipe that shards the optimizer, without arguments: with Megatron, or
    ``served`` with ``dpu_optimizer`` added. Also return its checkpoint metadata."""

    def body() -> dict[str, Any]:
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            bucket_size=300,
            dpu_optimizer=served,
            dpu_reduce_backend="flat" if served else "auto",
        )
        # Megatron-Bridge sets both from the optimizer's config once the config is complete.
        config.use_distributed_optimizer = config.overlap_param_gather = True
        module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        (ddp,) = training.wrap_model_chunks_with_ddp(
            [module], transformer, config, bucket_sizes=[config.bucket_size]
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.1,
                clip_grad=1.0,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
            ),
            [ddp],
        )
        for step in range(3):
            ddp.zero_grad_buffer()
            ddp(torch.sin(torch.arange(16.0).view(2, 8) + step + dist.get_rank())).sum().backward()
            ddp.finish_grad_sync()
            optimizer.step()
        if not served:
            ddp.start_param_sync(force_sync=True)
        parameters = dict(ddp.module.named_parameters())
        sharded = {name: ShardedTensor.from_rank_offsets(name, p) for name, p in parameters.items()}
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        if served:
            optimizer.sharded_state_dict(sharded, metadata=metadata)
        return {
            "parameters": {name: p.detach().clone() for name, p in parameters.items()},
            "config": (config.use_distributed_optimizer, config.overlap_param_gather),
            "form": metadata["distrib_optim_sharding_type"],
        }

    return _on_core(body)


def core_steps(folder: Path, config: dict[str, Any], offload: bool = False) -> dict[str, Any]:
    """Make three steps of two micro-batches on :class:`Mixed`; return the summed gradients of each.

    With ``offload`` the gradient buffers are freed and reallocated between steps.
    """

    def body() -> dict[str, Any]:
        ddp = _wrap(Mixed(), **config)
        gradients = []
        for step in range(3):
            ddp.zero_grad_buffer()
            for microbatch in range(2):
                x = torch.arange(16, dtype=torch.float32).view(2, 8)
                x = torch.sin(x + 100 * step + 10 * microbatch + dist.get_rank())
                if microbatch == 0:
                    with ddp.no_sync():
                        ddp(x).square().sum().backward()
                else:
                    ddp(x).square().sum().backward()
            ddp.finish_grad_sync()
            gradients.append({n: p.main_grad.clone() for n, p in ddp.module.named_parameters()})
            if offload:
                ddp.offload_grad_buffers()
                ddp.restore_grad_buffers()
        ops = [
            _told(getattr(bucket, "dpu_reduce_op", None))
            for buffer in ddp.buffers + ddp.expert_parallel_buffers
            for bucket in buffer.buckets
        ]
        return {"gradients": gradients, "ops": ops, "pushed": _pushed_bytes()}

    return _on_core(body)


def _told(op: Any) -> Any:
    """Return an operation without fields that cannot be pickled."""
    return op and dataclasses.replace(op, node_whole=None, node_shards=None)


def _pushed_bytes() -> int:
    """Return the bytes that this rank has sent to servers, as the engine counts them; 0 without
    BytePS."""
    bps = sys.modules.get("byteps.torch")
    return bps.get_metrics()["byteps_worker_pushed_bytes_total"] if bps is not None else 0


def core_one_more(folder: Path, environment: dict[str, str]) -> tuple[list[Any], list[Any]]:
    """Return gradients and operations of the second of two models that all ranks wrap, after rank 0
    has wrapped another model in its own group, whose lowest rank is the same."""

    def body() -> tuple[list[Any], list[Any]]:
        alone = dist.new_group([0])
        _wrap(Mixed(), use_dpu_reduce=True)
        if dist.get_rank() == 0:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            groups.dp = groups.dp_cp = groups.expt_dp = alone
            groups.intra_dp_cp = groups.intra_expt_dp = alone
            _wrap(Mixed(), pg_collection=groups, use_dpu_reduce=True)
        ddp = _wrap(Mixed(), use_dpu_reduce=True)
        ddp.zero_grad_buffer()
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            buffer.grad_data.fill_(2.0 + 2.0 * dist.get_rank())
        ddp.finish_grad_sync()
        buffers = ddp.buffers + ddp.expert_parallel_buffers
        return (
            [p.main_grad.clone() for p in ddp.module.parameters()],
            [bucket.dpu_reduce_op for buffer in buffers for bucket in buffer.buckets],
        )

    return _on_core(body)


def core_forced(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Make a step in which every bucket must be summed as a whole, as when Megatron saves
    gradients."""

    def body() -> dict[str, torch.Tensor]:
        ddp = _wrap(Mixed(), **config)
        ddp.zero_grad_buffer()
        ddp(torch.full((2, 8), 1.0 + dist.get_rank())).sum().backward()
        ddp.finish_grad_sync(force_all_reduce=True)
        return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}

    return _on_core(body)


def core_no_sync(folder: Path, config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the number of push-pulls started in each of two steps: after the micro-batch without
    sums, after the one with sums, and at the end of the step."""

    def body() -> list[tuple[int, int, int]]:
        import byteps.torch as bps

        ddp = _wrap(Mixed(), **config, use_dpu_reduce=True)
        push_pull, started = bps.push_pull_async_inplace, 0

        def counted(*args: Any, **kwargs: Any) -> int:
            nonlocal started
            started += 1
            return push_pull(*args, **kwargs)

        bps.push_pull_async_inplace = counted
        seen = []
        for _ in range(2):
            ddp.zero_grad_buffer()
            started = 0
            with ddp.no_sync():
                ddp(torch.ones(2, 8)).sum().backward()
            without = started
            ddp(torch.ones(2, 8)).sum().backward()
            during = started
            ddp.finish_grad_sync()
            seen.append((without, during, started))
        return seen

    return _on_core(body)


def core_priorities(folder: Path) -> list[int]:
    """Return the priority of each bucket of a buffer."""

    def body() -> list[int]:
        import byteps.torch as bps

        module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        ddp = _wrap(module, overlap_grad_reduce=True, bucket_size=64, use_dpu_reduce=True)
        push_pull, seen = bps.push_pull_async_inplace, list[int]()

        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs.get("priority", 0))
            return push_pull(*args, **kwargs)

        bps.push_pull_async_inplace = noted
        ddp(torch.ones(2, 8)).sum().backward()
        ddp.finish_grad_sync()
        return seen

    return _on_core(body)


def core_models(folder: Path) -> list[list[Any]]:
    """Return the operations of two models that a process wraps, one after the other."""

    def body() -> list[list[Any]]:
        models = [_wrap(Mixed(), use_dpu_reduce=True) for _ in range(2)]
        return [[b.dpu_reduce_op for buffer in m.buffers for b in buffer.buckets] for m in models]

    return _on_core(body)


def core_refused(folder: Path) -> dict[str, str]:
    """Return DDP's errors for unsupported settings."""

    def text(build: Callable[[], object]) -> str:
        try:
            build()
        except ValueError as error:
            return str(error)
        return ""

    def body() -> dict[str, str]:
        changed = DistributedDataParallelConfig(use_dpu_reduce=True)
        changed.fake_process_group = True
        transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        cut = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        cut.tensor_parallel_num_weight_shards = 2
        updates = DistributedDataParallelConfig(use_dpu_reduce=True, dpu_optimizer=True)
        return {
            "changed": text(lambda: DistributedDataParallel(transformer, changed, Mixed())),
            "model": text(lambda: DistributedDataParallel(cut, updates, Mixed())),
        }

    return _on_core(body)
