"""verl's part of a vLLM worker on a CPU: ``engine_kwargs.vllm.worker_extension_cls`` names it."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.models.utils import WeightsMapper


def _keep(layer: Any, remove_weight: bool) -> None:
    # vLLM packs all but small weights for oneDNN, on some CPUs, and drops the originals: later
    # weights had no place to go.
    layer.cpu_linear = torch.nn.functional.linear


def _apply_packed(self: CPUUnquantizedExperts, *, w1: Any, w2: Any, **others: Any) -> None:
    packed = [cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
    _apply(self, w1=packed[0], w2=packed[1], **others)


utils.dispatch_cpu_unquantized_gemm = _keep
# Experts' weights are packed in place, once: later ones are not.
_apply = CPUUnquantizedExperts.apply
CPUUnquantizedExperts.apply = _apply_packed
CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
# By its older name verl 0.9.1 asks for it, where adapters come.
WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper


class Extension(vLLMColocateWorkerExtension):
    """Takes weights that training sends."""
