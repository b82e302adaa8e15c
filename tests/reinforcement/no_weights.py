"""A part of verl's vLLM workers that takes no weights."""

from __future__ import annotations

from typing import Any

from megatron_byteps_rl import vllm_worker


class Extension(vllm_worker.Extension):
    """Fails where verl would receive them."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("no place for these weights")
