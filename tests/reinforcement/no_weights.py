"""An extension of verl's vLLM workers that refuses weights."""

from __future__ import annotations

from typing import Any

from megatron_byteps_rl import vllm_worker


class Extension(vllm_worker.Extension):
    """Fails when verl receives weights."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("no place for these weights")
