"""The types in which tensors travel: their own, a half type, or blocks of few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch.tensors import DTYPES

BLOCK = 128
"""Values of a block. Results depend on where blocks begin: each tensor's first at its start."""


@dataclass(frozen=True)
class WireType:
    """A type in which values travel.

    ``int8`` and ``int4`` are blocks of 128 values with one bfloat16 scale: 130 or 66 bytes. Servers
    add them in fp32 and round the sum once. With feedback, what rounding loses of a value is added
    to the next value of the same place: on the worker of what goes up, on the server of what comes
    down.
    """

    name: str
    """As users and logs have it: bf16, int8, float32."""
    engine_name: str
    """As `c_lib` has it."""
    memory: torch.dtype
    """Of memory that holds it."""
    values: int = 1
    """Of an element."""
    element_bytes: int = 0
    feedback: bool = False

    @property
    def is_block(self) -> bool:
        """Whether an element is a block of values."""
        return self.values > 1

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of `dtype` can be sent as this."""
        if self.is_block:
            return dtype in (torch.float32, *_SHORT)
        return self.memory == dtype or dtype in _ROUNDED

    def nbytes(self, numel: int) -> int:
        """Bytes of so many values; the last block is filled up."""
        return -(-numel // self.values) * self.element_bytes

    def empty(self, numel: int, device: torch.device) -> torch.Tensor:
        """Memory for so many values."""
        elements = self.nbytes(numel) // self.memory.itemsize
        return torch.empty(elements, dtype=self.memory, device=device)

    def __str__(self) -> str:
        return f"{self.name} with feedback" if self.feedback else self.name


Wire = torch.dtype | str | WireType
"""What users may name: a torch type, or a name of `NAMES`."""

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROUNDED = (torch.float32, torch.float64)


def _plain(dtype: torch.dtype) -> WireType:
    name = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    return WireType(name, DTYPES[dtype], dtype, 1, dtype.itemsize)


_PLAIN = {dtype: _plain(dtype) for dtype in DTYPES}


def int8(*, feedback: bool = False) -> WireType:
    """Blocks of 8 bits: 1.016 bytes a value."""
    return WireType("int8", "int8x128", torch.uint8, BLOCK, BLOCK + 2, feedback)


def int4(*, feedback: bool = True) -> WireType:
    """Blocks of 4 bits: 0.516 bytes a value."""
    return WireType("int4", "int4x128", torch.uint8, BLOCK, BLOCK // 2 + 2, feedback)


NAMES: dict[str, WireType] = {
    "bf16": _PLAIN[torch.bfloat16],
    "fp16": _PLAIN[torch.float16],
    "int8": int8(),
    "int4": int4(),
}
"""Types other than a tensor's own, by their names."""


def of(dtype: torch.dtype, wire: Wire | None = None) -> WireType:
    """The type in which a tensor of `dtype` travels. `wire`: what was asked for; None: its own.

    Raises:
        ValueError: there is no such type, or a tensor of this type cannot be sent so.
    """
    if wire is None or wire in (dtype, _PLAIN.get(dtype)):
        return _PLAIN[dtype]
    asked = wire if isinstance(wire, WireType) else _named(wire)
    if not asked.takes(dtype):
        name = asked.name if asked.is_block else asked.memory
        raise ValueError(f"a tensor of {dtype} cannot be sent as {name}")
    return asked


def _named(wire: torch.dtype | str) -> WireType:
    if isinstance(wire, torch.dtype):
        wire = _SHORT.get(wire, str(wire))
    if wire not in NAMES:
        raise ValueError(
            f"wire_dtype is {wire}; it can be torch.bfloat16, torch.float16, or one of "
            f"{', '.join(map(repr, NAMES))}"
        )
    return NAMES[wire]
