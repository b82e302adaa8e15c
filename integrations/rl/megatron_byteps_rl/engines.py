"""verl's Megatron engines with Megatron's local layers, which need no Transformer Engine."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray

VENDOR = "local"
"""Value of ``VERL_ENGINE_VENDOR`` that makes verl use these engines."""

SPARE = "MEGATRON_BYTEPS_RL_SPARE"
"""Variable of a process that has imported everything and waits until it replaces a lost rank."""

# Features that Megatron and its bridge would take from Transformer Engine and Apex.
_FUSED = (
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion"),
    *("bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"),
    *("cross_entropy_loss_fusion", "moe_grouped_gemm", "moe_permute_fusion"),
)


def transformer() -> dict[str, Any]:
    """Return settings of Megatron's transformer, and the device for initializing weights."""
    plain = {"attention_backend": "unfused", **dict.fromkeys(_FUSED, False)}
    return {**plain, "use_cpu_initialization": get_device_name() == "cpu"}


def _buffers(chunk: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(chunk, DistributedDataParallel):
        return []
    return chunk.buffers + chunk.expert_parallel_buffers


def are_wanted() -> bool:
    """Return whether this process must use these engines instead of verl's own."""
    return os.environ.get("VERL_PLATFORM") == "cpu" or (
        os.environ.get("VERL_ENGINE_VENDOR") == VENDOR
    )


_prepared = False


def prepare(*, joins: bool = True) -> None:
    """Make this process a worker with these engines. Called once, before verl imports its own.

    Args:
        joins: whether to call :func:`join`, too.
    """
    global _prepared
    if _prepared:
        return
    _prepared = True
    # This import must come before torch.cuda's replacements are installed.
    import verl.workers.rollout.vllm_rollout  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    from megatron_byteps_hf.bridge import auto_bridge

    auto_bridge()
    if get_device_name() == "cpu":
        from megatron.training import cpu_layers, cpu_platform

        cpu_platform.install()
        cpu_layers.allow_sequence_parallel()
        cpu_layers.allow_context_parallel()
    if joins:
        join()
    keep_parameters()
    register()


def join() -> None:
    """Join the process group of the environment, over gloo, and over NCCL for GPUs. A rank takes
    the GPU of its local rank among the visible GPUs. Raises RuntimeError if it cannot join, or if
    it needs a GPU and sees none."""
    if get_device_name() == "cpu":
        # verl would name gloo twice, for the CPU and for the device, which torch refuses.
        initialize_global_process_group_ray(backend="gloo")
    else:
        take_gpu()
        initialize_global_process_group_ray()


def keep_parameters() -> None:
    """Let a run with adapters resume from a checkpoint.

    verl 0.9.1 loads adapters into the sharded state, and then uses that state to describe the
    optimizer's. Loading puts detached tensors there, which Megatron's optimizer cannot match with
    its parameters.
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
    """Make this rank's GPU the current one. Under Ray a process sees only its own. Raises
    RuntimeError if torch sees none."""
    seen = torch.cuda.device_count()
    if seen == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise RuntimeError(
            f"rank {os.environ.get('RANK', '0')} sees no GPU (CUDA_VISIBLE_DEVICES={visible})"
        )
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % seen)
    torch.cuda.init()


def register() -> None:
    """Register these as verl's Megatron engines: for the CPU, and as a vendor's engines for
    GPUs."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Sequences are padded on the right, so the causal mask is sufficient. Megatron's local
        # attention does not accept a mask of verl's shape.
        return args, {**kwargs, "attention_mask": None}

    mixed_in: Any = object  # the other base class below is an engine of verl

    class Local(mixed_in):
        """Megatron's local layers."""

        def _build_tf_config(self) -> None:
            own, chosen = transformer(), self.engine_config.override_transformer_config
            self.engine_config.override_transformer_config.update(
                {**own, "transformer_layer_spec": local_layer_spec}
                | {"pipeline_dtype": torch.bfloat16}
                | {name: chosen[name] for name in chosen if name not in own}
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
        """Megatron's local layers on a CPU."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            # verl seeds Megatron's generator only if it finds a device.
            model_parallel_cuda_manual_seed(self.engine_config.seed)

        def to(
            self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
        ) -> None:
            """Move parameters and gradients to the host or back, as on a GPU.

            Device and host have the same name here, so the place of the parameters decides the
            direction.
            """
            buffers = [buffer for chunk in self.module for buffer in _buffers(chunk)]
            if not (model and buffers):
                return  # nothing to do from the CPU to the CPU
            if any(buffer.param_data.untyped_storage().nbytes() == 0 for buffer in buffers):
                load_megatron_model_to_gpu(self.module, load_grad=grad)
            else:
                offload_megatron_model_to_cpu(self.module)

    for model_type, engine in (
        ("language_model", MegatronEngineWithLMHead),
        ("value_model", MegatronEngineWithValueHead),
    ):
        for kind, registration in (
            (OnCpu, {"device": "cpu"}),
            (Local, {"device": "cuda", "vendor": VENDOR}),
        ):
            about = f"{engine.__name__}: {kind.__doc__}"
            made = type(f"{kind.__name__}{engine.__name__}", (kind, engine), {"__doc__": about})
            EngineRegistry.register(model_type=model_type, backend="megatron", **registration)(made)
