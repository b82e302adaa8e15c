"""Where the ranks of a comparison compute, on the CPU over gloo or each on a GPU over NCCL, and the
servers next to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What makes a training job run on a kind of device."""

    name: str
    environment: Mapping[str, str]
    """Of every rank."""
    arguments: tuple[str, ...] = ()
    """Of Megatron, under either backend."""
    shares_devices: bool = False
    """Ranks have GPUs; where several share a host, hosts that are taken to differ share them."""
    preloaded: tuple[str, ...] | None = None
    """Modules that the process has imported from which ranks are forked; None: the program's, with
    all that it needs."""


CPU = Platform(
    name="cpu",
    # Also on a machine with GPUs.
    environment={"MEGATRON_CPU": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
)

CUDA = Platform(
    name="cuda",
    environment={
        "MEGATRON_CPU": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it where tensors are cut
        # The two runs are compared bit by bit: matrix products and NCCL always in one order.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    },
    shares_devices=True,
    # What works without Transformer Engine and Apex, and needs no compiler while it runs.
    arguments=(
        *("--transformer-impl", "local", "--attention-backend", "unfused"),
        *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion", "--no-bias-gelu-fusion"),
        *("--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--disable-jit-fuser"),
    ),
    # Importing Megatron asks for the number of GPUs, after which CUDA does not start in a child.
    preloaded=("torch",),
)

CUDA_TE = dataclasses.replace(
    CUDA,
    # Its layers read this when they are built.
    environment={**CUDA.environment, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    # No compiler while it runs.
    arguments=("--transformer-impl", "transformer_engine", "--disable-jit-fuser"),
)
"""With layers of Transformer Engine."""

PLATFORMS = {platform.name: platform for platform in (CPU, CUDA)}

THROUGH_SERVERS = ("--use-dpu-reduce", "--dpu-reduce-route", "flat")
"""Arguments of Megatron."""
SMALL_PARTITIONS = {"BYTEPS_PARTITION_BYTES": "4096"}
TWO_SERVERS = {"BYTEPS_EMBEDDED_SERVERS": "2", **SMALL_PARTITIONS}
"""Variables of ranks: with these it matters which server sums what, and which part is pulled."""
