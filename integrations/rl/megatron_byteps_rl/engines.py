"""verl's Megatron engines with Megatron's local layers, which need no Transformer Engine."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray

VENDOR = "local"
"""Under which verl finds these engines where ``VERL_ENGINE_VENDOR`` names it."""

# What Megatron and its bridge would take from Transformer Engine and Apex.
_FUSED = (
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion"),
    *("bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"),
    *("cross_entropy_loss_fusion", "moe_grouped_gemm", "moe_permute_fusion"),
)


def transformer() -> dict[str, Any]:
    """Settings of Megatron's transformer, and where this process initializes weights."""
    plain = {"attention_backend": "unfused", **dict.fromkeys(_FUSED, False)}
    return {**plain, "use_cpu_initialization": get_device_name() == "cpu"}


def _buffers(chunk: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(chunk, DistributedDataParallel):
        return []
    return chunk.buffers + chunk.expert_parallel_buffers


def are_wanted() -> bool:
    """Whether this process is to use these engines, and not verl's own."""
    return os.environ.get("VERL_PLATFORM") == "cpu" or (
        os.environ.get("VERL_ENGINE_VENDOR") == VENDOR
    )


_prepared = False


def prepare() -> None:
    """Make this process a worker with these engines, before verl imports its own; once.

    Joins the process group that the environment describes: over gloo, and NCCL for GPUs. A rank
    takes the GPU of its local rank, among those that it sees. Raises RuntimeError where it cannot
    join, or a GPU is wanted and none is seen.
    """
    global _prepared
    if _prepared:
        return
    _prepared = True
    # Before torch.cuda's stand-ins are there.
    import verl.workers.rollout.vllm_rollout  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    from megatron_byteps_hf.bridge import auto_bridge

    auto_bridge()
    if get_device_name() == "cpu":
        from megatron.training import cpu_layers, cpu_platform

        cpu_platform.install()
        cpu_layers.allow_sequence_parallel()
        cpu_layers.allow_context_parallel()
        # verl would name gloo twice, once for the CPU and once for the device, which torch refuses.
        initialize_global_process_group_ray(backend="gloo")
    else:
        take_gpu()
        initialize_global_process_group_ray()
    keep_parameters()
    register()


def keep_parameters() -> None:
    """Let a run with adapters go on from a checkpoint.

    verl 0.9.1 loads adapters into the sharded state that it then asks for the optimizer's. Loading
    puts detached tensors there, by which Megatron's optimizer does not find its parameters.
    """
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    def copied(filtered: Any) -> Any:
        if isinstance(filtered, dict):
            return {name: copied(value) for name, value in filtered.items()}
        return copy.copy(filtered)

    choose = MegatronCheckpointManager._maybe_filter_peft_state_dict
    MegatronCheckpointManager._maybe_filter_peft_state_dict = lambda self, state: (
        choose(self, state) if self.peft_cls is None else copied(choose(self, state))
    )


def take_gpu() -> None:
    """Make this rank's GPU the current one: under Ray a process sees only its own. Raises
    RuntimeError where torch sees none."""
    seen = torch.cuda.device_count()
    if seen == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise RuntimeError(
            f"rank {os.environ.get('RANK', '0')} sees no GPU (CUDA_VISIBLE_DEVICES={visible})"
        )
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % seen)
    torch.cuda.init()


def register() -> None:
    """Make these verl's Megatron engines: for the CPU, and as a vendor's for GPUs."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Sequences are padded on the right: what attention may not look at comes later anyhow, and
        # Megatron's local attention takes no mask of verl's shape.
        return args, {**kwargs, "attention_mask": None}

    mixed_in: Any = object  # an engine of verl's is the other base below

    class Local(mixed_in):
        """Megatron's local layers."""

        def _build_tf_config(self) -> None:
            mine, chosen = transformer(), self.engine_config.override_transformer_config
            self.engine_config.override_transformer_config.update(
                {**mine, "transformer_layer_spec": local_layer_spec}
                | {"pipeline_dtype": torch.bfloat16}
                | {name: chosen[name] for name in chosen if name not in mine}
            )
            super()._build_tf_config()

        def _build_megatron_module(self) -> Any:
            models = super()._build_megatron_module()
            for model in models:
                for part in model.modules():
                    if isinstance(part, GPTModel):
                        part.register_forward_pre_hook(without_mask, with_kwargs=True)
            return models

    class OnCpu(Local):
        """The same on a CPU."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            # verl seeds Megatron's generator of the device where it counts a device.
            model_parallel_cuda_manual_seed(self.engine_config.seed)

        def to(
            self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
        ) -> None:
            """As on a GPU, where parameters and gradients move to the host or back.

            Device and host have one name here: where the parameters are says what is meant.
            """
            buffers = [buffer for chunk in self.module for buffer in _buffers(chunk)]
            if not (model and buffers):
                return  # from the CPU to the CPU
            if any(buffer.param_data.untyped_storage().nbytes() == 0 for buffer in buffers):
                load_megatron_model_to_gpu(self.module, load_grad=grad)
            else:
                offload_megatron_model_to_cpu(self.module)

    for model_type, engine in (
        ("language_model", MegatronEngineWithLMHead),
        ("value_model", MegatronEngineWithValueHead),
    ):
        for kind, place in (
            (OnCpu, {"device": "cpu"}),
            (Local, {"device": "cuda", "vendor": VENDOR}),
        ):
            about = f"{engine.__name__}: {kind.__doc__}"
            made = type(f"{kind.__name__}{engine.__name__}", (kind, engine), {"__doc__": about})
            EngineRegistry.register(model_type=model_type, backend="megatron", **place)(made)
