"""What a model of Transformer Engine's layers needs in addition to them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers

DOCUMENTS = (0, 24, 40, 64)
"""Where the documents of a packed row begin, and where the last one ends."""


def fuse_output_layer() -> None:
    """Have Megatron's own output layer add its weight's gradient to the bucket.

    Transformer Engine's layers do; for this one Megatron takes a kernel of Apex.
    """

    def add(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
        """``[n, in]`` and ``[n, out]``, into ``[out, in]``."""
        total.add_(grads.t().float() @ inputs.float())

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
    )
    layers._grad_accum_fusion_available = True


def pack(model: torch.nn.Module) -> None:
    """Have a model take each row of tokens for several documents, laid end to end."""

    def with_documents(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        tokens, position_ids, _ = args
        starts = torch.tensor(DOCUMENTS, dtype=torch.int32, device=tokens.device)
        longest = max(end - begin for begin, end in pairwise(DOCUMENTS))
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        # The documents say what a token may look at.
        return (tokens, position_ids, None), {**kwargs, "packed_seq_params": packed}

    model.register_forward_pre_hook(with_documents, with_kwargs=True)
