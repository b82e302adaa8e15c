# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""``--dpu-reduce-keep-bf16``: gradients that stay bf16 if others travel in few bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FLAG = "--dpu-reduce-keep-bf16"


@dataclass(frozen=True, kw_only=True)
class KeptBf16:
    """Parameters that stay bf16, in addition to norms, biases and routers."""

    patterns: tuple[re.Pattern[str], ...] = ()
    """Patterns of parameter names."""
    least_bytes: int | None = None
    """Limit in bytes: parameters with smaller gradients also stay bf16. None: BytePS's default."""


def parse(words: Sequence[str] | None) -> KeptBf16:
    """Parse the flag's words: patterns, and at most one number of bytes.

    Raises:
        ValueError: a word is not a regular expression, or two words are numbers.
    """
    numbers = [word for word in words or () if word.isdecimal()]
    if len(numbers) > 1:
        raise ValueError(f"{_FLAG}: {' and '.join(numbers)} are two numbers of bytes: give one")
    patterns = []
    for word in words or ():
        if word.isdecimal():
            continue
        try:
            patterns.append(re.compile(word))
        except re.error as error:
            raise ValueError(f"{_FLAG}: {word!r} is no regular expression: {error}") from error
    return KeptBf16(patterns=tuple(patterns), least_bytes=int(numbers[0]) if numbers else None)
