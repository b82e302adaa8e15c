"""verl's part of a vLLM worker on a CPU: ``engine_kwargs.vllm.worker_extension_cls`` names it."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils


def _keep(layer: Any, remove_weight: bool) -> None:
    # vLLM packs all but small weights for oneDNN, on some CPUs, and drops the originals: later
    # weights had no place to go.
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _keep


class Extension(vLLMColocateWorkerExtension):
    """Takes weights that training sends."""
