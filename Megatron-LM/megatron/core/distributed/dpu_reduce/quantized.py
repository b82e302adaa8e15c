# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Parameters of fp8 or fp4, where servers keep the optimizer.

Servers send parameters in the wire dtype, and each rank quantizes what comes down. That is what
Megatron does with bf16 parameters before each product of matrices; with ``--fp8-param-gather`` it
quantizes the fp32 ones instead, once, and gathers the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class _Quantized:
    """Reads and writes one parameter of Transformer Engine's."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    def read(self) -> torch.Tensor:
        """The first time the values before they were quantized, where those were kept."""
        from ...fp8_utils import dequantize_fp8_tensor

        kept = getattr(self._parameter, "get_high_precision_init_val", None)
        values: torch.Tensor | None = kept() if kept is not None else None
        if values is None:
            return dequantize_fp8_tensor(self._parameter)
        self._parameter.clear_high_precision_init_val()
        return values.view(self._parameter.shape)

    def write(self, values: torch.Tensor) -> None:
        from ...fp8_utils import copy_tensor_to_quantized_param

        copy_tensor_to_quantized_param(self._parameter, values)


def codecs_of(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, _Quantized]:
    """How to read and write those of the parameters that are quantized.

    Raises:
        ValueError: one is a group of parameters, which has no values of its own.
    """
    from ...fp8_utils import is_grouped_tensor_with_quantized_storage
    from ..param_and_grad_buffer import _param_uses_quantized_storage

    codecs = {}
    for parameter in parameters:
        if is_grouped_tensor_with_quantized_storage(parameter):
            raise ValueError(
                "--dpu-optimizer does not work with --moe-single-grouped-weight and parameters of "
                "fp8 or fp4: the weights of all experts are one, which cannot be read as a whole"
            )
        if _param_uses_quantized_storage(parameter):
            codecs[parameter] = _Quantized(parameter)
    return codecs
