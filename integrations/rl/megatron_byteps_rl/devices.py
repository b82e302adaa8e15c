"""What ranks compute on: the CPU, or each a GPU, and what either needs to be told beforehand."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

NEEDED = ("verl", "ray", "tensordict", "hydra", "transformers", "megatron.bridge")
"""Modules of a job."""
_COMMON = {
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    # Megatron's small fused functions would be compiled at the first step, on every rank.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron's engine shows a bar for each batch.
    "TQDM_DISABLE": "1",
}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        **_COMMON,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "megatron_byteps_rl.cpu",
        "MEGATRON_CPU": "1",
    },
    "cuda": {
        **_COMMON,
        "VERL_PLATFORM": "nvidia",
        # verl takes the engines that were registered for this vendor: see engines.register().
        "VERL_ENGINE_VENDOR": "local",
        "MEGATRON_CPU": "0",
        # Megatron asks for it where tensors are cut.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Runs are compared bit by bit: matrix products and NCCL always in one order.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    },
}
"""By device: of every process of a job, before verl and Megatron are imported."""


def check(device: str, ranks: int) -> None:
    """Refuse a job that cannot run here.

    Args:
        device: of ``ENVIRONMENTS``.
        ranks: which need a GPU each.

    Raises:
        ValueError: a package is missing, or torch sees fewer GPUs than there are ranks.
    """
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not installed here; use `make rl`, or a bundle made by "
            '`make bundle WITH="rl"`'
        )
    if device == "cpu":
        return
    import torch

    seen = torch.cuda.device_count()
    if seen == 0:
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no GPU here")
    if ranks > seen:
        # NCCL refuses two ranks of a machine on one GPU.
        raise ValueError(
            f"--device {device}: {ranks} ranks need {ranks} GPUs, and torch sees {seen}"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False
