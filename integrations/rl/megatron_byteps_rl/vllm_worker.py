"""verl's extension of a vLLM worker on a CPU, set by
``engine_kwargs.vllm.worker_extension_cls``."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.models.utils import WeightsMapper


def _keep(layer: Any, remove_weight: bool) -> None:
    # On some CPUs vLLM packs weights for oneDNN, unless they are small, and drops the originals.
    # Then it could not load later weights.
    layer.cpu_linear = torch.nn.functional.linear


def _apply_packed(self: CPUUnquantizedExperts, *, w1: Any, w2: Any, **others: Any) -> None:
    packed = [cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
    _apply(self, w1=packed[0], w2=packed[1], **others)


utils.dispatch_cpu_unquantized_gemm = _keep
# vLLM packs experts' weights in place, but only once, so later weights would stay unpacked.
_apply = CPUUnquantizedExperts.apply
CPUUnquantizedExperts.apply = _apply_packed
CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
# verl 0.9.1 uses the older name for adapters.
WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper


class Extension(vLLMColocateWorkerExtension):
    """Receives weights from training."""
