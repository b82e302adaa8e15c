"""The CPU as a platform of verl's, and verl's Megatron engines on it.

verl imports this module where ``VERL_USE_EXTERNAL_MODULES`` names it, and takes the platform where
``VERL_PLATFORM=cpu``; see ``cpu_environment``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device:
    """``torch.cuda`` with Megatron's stand-ins, which are in place in all workers, and a name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "CPU"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """What verl asks a device for, with its nearest meaning on the CPU."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return _Device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


# What Megatron and its bridge would take from Transformer Engine and Apex.
TRANSFORMER = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "attention_backend": "unfused",
}
"""Settings of Megatron's transformer on a CPU."""


def held_bytes(chunks: Iterable[Any]) -> int:
    """Bytes that the parameter and gradient buffers of these model chunks take now.

    Chunks that do not train have no such buffers.
    """
    tensors = [
        tensor
        for chunk in chunks
        for b in _buffers(chunk)
        for tensor in (b.param_data, b.grad_data)
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


def _buffers(chunk: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(chunk, DistributedDataParallel):
        return []
    return chunk.buffers + chunk.expert_parallel_buffers


def is_wanted() -> bool:
    """Whether this process is to do without GPUs."""
    return os.environ.get("VERL_PLATFORM") == "cpu"


def prepare() -> None:
    """Make this process a worker on the CPU; once, before verl imports its engines.

    Joins the process group that the environment describes, over gloo.

    Raises:
        RuntimeError: torch.distributed could not be joined.
    """
    from megatron.training import cpu_platform

    from megatron_byteps_hf.bridge import auto_bridge

    if cpu_platform.is_active():
        return
    # transformers' models are imported before torch.cuda's stand-ins are there.
    from transformers import AutoModelForCausalLM  # noqa: F401

    auto_bridge()
    cpu_platform.install()
    # verl tells each rank that it is alone on its host, which would start servers beside each.
    if size := os.environ.get("RAY_LOCAL_WORLD_SIZE"):
        local_rank = int(os.environ["RANK"]) % int(size)
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=size)
    # verl would name gloo twice, once for the CPU and once for the device, which torch refuses.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    _register_engines()


def _register_engines() -> None:
    """Megatron's engines of verl, under the device name of this platform."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from verl.utils.megatron_utils import (
        load_megatron_model_to_gpu,
        offload_megatron_model_to_cpu,
    )
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import (
        MegatronEngineWithLMHead,
        MegatronEngineWithValueHead,
    )

    def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Sequences are padded on the right: what attention may not look at comes later anyhow, and
        # Megatron's local attention takes no mask of verl's shape.
        return args, {**kwargs, "attention_mask": None}

    mixed_in: Any = object  # an engine of verl's comes beside it below

    class OnCpu(mixed_in):
        """Megatron's local layers."""

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

        def _build_tf_config(self) -> None:
            chosen = self.engine_config.override_transformer_config
            self.engine_config.override_transformer_config.update(
                {**TRANSFORMER, "transformer_layer_spec": local_layer_spec}
                | {"pipeline_dtype": torch.bfloat16}
                | {name: chosen[name] for name in chosen if name not in TRANSFORMER}
            )
            super()._build_tf_config()

        def _build_megatron_module(self) -> Any:
            models = super()._build_megatron_module()
            for model in models:
                for part in model.modules():
                    if isinstance(part, GPTModel):
                        part.register_forward_pre_hook(without_mask, with_kwargs=True)
            return models

    for model_type, engine in (
        ("language_model", MegatronEngineWithLMHead),
        ("value_model", MegatronEngineWithValueHead),
    ):
        name = f"Cpu{engine.__name__}"
        made = type(name, (OnCpu, engine), {"__doc__": f"{engine.__name__} on a CPU."})
        EngineRegistry.register(model_type=model_type, backend="megatron", device="cpu")(made)
