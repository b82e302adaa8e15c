"""Checks of tensors that the engine can sum, and the types in which values travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from byteps.torch import c_lib

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
}
"""Element types that servers can add, with the engine's names."""


def check(tensor: torch.Tensor, what: str) -> None:
    """Check that a tensor can be summed. `what` is its name in the error.

    Raises:
        TypeError: it is not a tensor.
        ValueError: its type, layout, device or memory cannot be used.
    """
    # Every sum makes these checks, so each must take only a fraction of a microsecond.
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and (tensor.is_cuda or tensor.is_cpu)
    ):
        check_memory(tensor, what)
    else:
        _refuse(tensor, what)


def _refuse(tensor: torch.Tensor, what: str) -> NoReturn:
    """Raise the error that says why a tensor cannot be summed: see `check`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} is {tensor.layout}; call .to_dense() first")
    if tensor.is_complex():
        raise ValueError(f"{what} is {tensor.dtype}; pass torch.view_as_real(tensor)")
    if tensor.dtype not in DTYPES:
        known = ", ".join(sorted(DTYPES.values()))
        raise ValueError(f"{what} is {tensor.dtype}; it can be {known}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: it is not "
            "contiguous; pass tensor.contiguous(), or the tensor that it is a view of"
        )
    raise ValueError(f"{what} is on {tensor.device}; only CPU and CUDA tensors can be summed")


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Raise ValueError if the memory of a tensor was freed."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if (there := tensor.untyped_storage().nbytes()) < end:
        raise ValueError(
            f"{what} ends at byte {end:,} of a storage of {there:,} bytes: its memory was freed, "
            "as when buffers are offloaded; bring it back first"
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor fills its range of memory, in any order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def flat_view(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order, detached.

    Raises:
        ValueError: the tensor is sparse or has gaps. `what` is its name in the error.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} is {tensor.layout}; call .to_dense() first")
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1)
    if not is_dense(plain):
        raise ValueError(f"{what} has strides {plain.stride()}, which leave holes in memory")
    return plain.as_strided((plain.numel(),), (1,))


def device_number(device: torch.device) -> int:
    """Return the GPU's number; -1 for the CPU."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(device: torch.device) -> int:
    """Return the address of the device's current CUDA stream; 0 for the CPU.

    torch.cuda.current_stream would create an object, which takes 15 us in a thread that has slept.
    """
    return stream_of(device_number(device))


def stream_of(number: int) -> int:
    """Do the same as `current_stream` for the device with this number."""
    return 0 if number < 0 else torch._C._cuda_getCurrentRawStream(number)


# Types in which tensors travel: the tensor's own, a half type, or blocks of few bits.


BLOCK = 128
"""Values per block. A tensor's first block begins at its first element. Results depend on where
blocks begin."""


@dataclass(frozen=True)
class WireType:
    """A type in which values travel.

    ``int8`` and ``int4`` are blocks of 128 values with one bfloat16 scale: 130 or 66 bytes. Servers
    add them in fp32 and round the sum once. With feedback, the rounding loss of a value is added to
    the next value of the same element: on the worker for pushes, on the server for pulls.
    """

    name: str
    """Name for users and logs: bf16, int8, float32."""
    engine_name: str
    """Name in `c_lib`."""
    memory: torch.dtype
    """torch type of the memory that holds elements of this type."""
    values: int = 1
    """Values per element."""
    element_bytes: int = 0
    feedback: bool = False

    @property
    def is_block(self) -> bool:
        """Return whether an element is a block of values."""
        return self.values > 1

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether a tensor of `dtype` can be sent in this type."""
        if self.is_block:
            return dtype in (torch.float32, *_SHORT)
        return self.memory == dtype or dtype in _ROUNDED

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` values; the last block is padded."""
        return -(-numel // self.values) * self.element_bytes

    def empty(self, numel: int, device: torch.device) -> torch.Tensor:
        """Allocate memory for `numel` values."""
        elements = self.nbytes(numel) // self.memory.itemsize
        return torch.empty(elements, dtype=self.memory, device=device)

    def __str__(self) -> str:
        return f"{self.name} with feedback" if self.feedback else self.name


Wire = torch.dtype | str | WireType
"""Wire types that users may give: a torch type, or a name of `NAMES`."""

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROUNDED = (torch.float32, torch.float64)


def _plain(dtype: torch.dtype) -> WireType:
    name = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    return WireType(name, DTYPES[dtype], dtype, 1, dtype.itemsize)


_PLAIN = {dtype: _plain(dtype) for dtype in DTYPES}


def int8(*, feedback: bool = False) -> WireType:
    """Return the type with blocks of 8 bits: 1.016 bytes per value."""
    return WireType("int8", "int8x128", torch.uint8, BLOCK, BLOCK + 2, feedback)


def int4(*, feedback: bool = True) -> WireType:
    """Return the type with blocks of 4 bits: 0.516 bytes per value."""
    return WireType("int4", "int4x128", torch.uint8, BLOCK, BLOCK // 2 + 2, feedback)


NAMES: dict[str, WireType] = {
    "bf16": _PLAIN[torch.bfloat16],
    "fp16": _PLAIN[torch.float16],
    "int8": int8(),
    "int4": int4(),
}
"""Wire types other than a tensor's own, by name."""


def of(dtype: torch.dtype, wire: Wire | None = None) -> WireType:
    """Return the type in which a tensor of `dtype` travels. `wire`: requested type; None: its own.

    Raises:
        ValueError: there is no such type, or a tensor of `dtype` cannot be sent in it.
    """
    if wire is None or wire in (dtype, _PLAIN.get(dtype)):
        return _PLAIN[dtype]
    wire_type = wire if isinstance(wire, WireType) else _named(wire)
    if not wire_type.takes(dtype):
        name = wire_type.name if wire_type.is_block else wire_type.memory
        raise ValueError(f"a tensor of {dtype} cannot be sent as {name}")
    return wire_type


def _named(wire: torch.dtype | str) -> WireType:
    if isinstance(wire, torch.dtype):
        wire = _SHORT.get(wire, str(wire))
    if wire not in NAMES:
        raise ValueError(
            f"wire_dtype is {wire}; it can be torch.bfloat16, torch.float16, or one of "
            f"{', '.join(map(repr, NAMES))}"
        )
    return NAMES[wire]


# Encoding and decoding of blocks: on the CPU by the engine, on a GPU by kernels.


def encode(
    values: torch.Tensor,
    wire: WireType,
    out: torch.Tensor,
    lost: torch.Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Round `values` to blocks.

    Args:
        values: flat and contiguous; fp32, bf16 or fp16.
        wire: a type of blocks.
        out: uint8, of `wire.nbytes(values.numel())` bytes, on the same device.
        lost: bf16, the same length as `values`: added to the values, then set to the rounding
            losses.
        seed: seed from `c_lib.chance_seed` for stochastic rounding; None: round to nearest.
    """
    if values.is_cuda:
        from byteps.torch.block_kernels import encode as encode_on_gpu

        encode_on_gpu(values, wire, out, lost, seed)
        return
    c_lib.encode_blocks(
        wire.engine_name,
        out.data_ptr(),
        DTYPES[values.dtype],
        values.data_ptr(),
        values.numel(),
        0 if lost is None else lost.data_ptr(),
        seed,
    )


def add_differences(blocks: torch.Tensor, held: torch.Tensor, out: torch.Tensor) -> None:
    """Add the servers' differences to parameters, and round to their type. Servers do the same, bit
    for bit, to their copy of the workers' values.

    Args:
        blocks: `wire.int8()` blocks, at least as many as hold the values.
        held: flat and contiguous; fp32, bf16 or fp16.
        out: the same size and type as `held`; may be `held` itself.
    """
    if held.is_cuda:
        from byteps.torch.block_kernels import add_differences as add_on_gpu

        add_on_gpu(blocks, held, out)
        return
    c_lib.add_differences(
        *(blocks.data_ptr(), DTYPES[held.dtype], held.data_ptr(), held.numel(), out.data_ptr())
    )


def decode(blocks: torch.Tensor, wire: WireType, out: torch.Tensor, *, skip: int = 0) -> None:
    """Decode values into `out`, rounded to its type. The first `skip` values are left out. `out`
    has as many elements as are wanted."""
    if out.is_cuda:
        from byteps.torch.block_kernels import decode as decode_on_gpu

        decode_on_gpu(blocks, wire, out, skip)
        return
    values = out if skip == 0 else out.new_empty(skip + out.numel())
    c_lib.decode_blocks(
        wire.engine_name, blocks.data_ptr(), DTYPES[out.dtype], values.data_ptr(), values.numel()
    )
    if skip > 0:
        out.copy_(values[skip:])


Spec = tuple[str, str, int, int, bool, bool, c_lib.Ranks, int | None, int, bool]
"""Description of a tensor for c_lib."""


@dataclass
class _Lost:
    values: torch.Tensor
    drops: int
    """Number of calls of `drop` when these losses were made. If it differs from the current number,
    the losses count as zeros."""
    spec: Spec | None = None
    """Spec under which servers keep losses for this tensor; None: servers keep none."""


class Feedback:
    """Rounding losses of this process's tensors, in bfloat16, by the names under which the tensors
    are summed. This object also tracks when servers have to drop their losses."""

    def __init__(self) -> None:
        self._lost: dict[str, _Lost] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        """Losses that were loaded for tensors that have not been sent since."""
        self._of_servers: dict[str, torch.Tensor] = {}
        """Losses of the servers that were loaded for tensors that have not been sent since."""
        self._drops = 0

    def of(
        self, name: str, numel: int, device: torch.device, spec: Spec | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Return the losses of a tensor that is about to be sent (at first zeros), and whether
        `drop` was called since the tensor was last sent.

        Raises:
            ValueError: the loaded losses have another size.
        """
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            if loaded.numel() != numel:
                raise ValueError(
                    f"the feedback loaded for {name!r} has {loaded.numel()} values, but the tensor "
                    f"has {numel}"
                )
            # The losses are copied, because they change with each sum.
            values = loaded.to(device=device, dtype=torch.bfloat16, copy=True)
            self._lost[name] = _Lost(values, self._drops)
        lost = self._lost.get(name)
        if lost is None or lost.values.numel() != numel or lost.values.device != device:
            values = torch.zeros(numel, dtype=torch.bfloat16, device=device)
            lost = self._lost[name] = _Lost(values, self._drops)
        lost.spec = spec
        if lost.drops == self._drops:
            return lost.values, False
        lost.values.zero_()
        lost.drops = self._drops
        return lost.values, True

    def drop(self) -> None:
        """Drop the losses of all tensors on this rank and, when a tensor is next sent, on the
        servers.

        All ranks call this between the same sums: after a step that was skipped or is repeated,
        because its losses belong to discarded values; and after a checkpoint without losses was
        loaded.
        """
        self._drops += 1
        self._loaded.clear()
        self._of_servers.clear()

    def names(self) -> list[str]:
        """Return the names of tensors that may have rounding losses."""
        sent = [name for name, lost in self._lost.items() if lost.drops == self._drops]
        return sorted({*sent, *self._loaded})

    def get(self, name: str) -> torch.Tensor | None:
        """Return a tensor's rounding losses on this process, not copied; None if there are none."""
        lost = self._lost.get(name)
        if name in self._loaded or lost is None:
            return self._loaded.get(name)
        return lost.values if lost.drops == self._drops else None

    def put(self, name: str, lost: torch.Tensor, of_servers: torch.Tensor | None) -> None:
        """Set the losses of a tensor, for the next time that it is sent.

        All ranks that sum the tensor call this between the same sums. One of these ranks also
        passes the servers' losses, `of_servers`, in whole blocks, and sends them to the servers
        together with the tensor.
        """
        self._loaded[name] = lost
        self._of_servers.pop(name, None)
        if of_servers is not None:
            self._of_servers[name] = of_servers

    def of_servers(self, name: str) -> torch.Tensor | Spec | None:
        """Return the servers' losses if `put` has set them, or the spec under which servers keep
        them. Return None if there are no losses."""
        if name in self._loaded:
            return self._of_servers.get(name)
        lost = self._lost.get(name)
        return lost.spec if lost is not None and lost.drops == self._drops else None

    def take_of_servers(self, name: str) -> torch.Tensor | None:
        """Remove and return the servers' losses, which the caller sends. Return None if servers
        already have them."""
        return self._of_servers.pop(name, None)

    def forget_name(self, name: str) -> None:
        """Release the memory of a tensor that is no longer summed."""
        self._lost.pop(name, None)
        self._loaded.pop(name, None)
        self._of_servers.pop(name, None)

    def forget(self) -> None:
        """Release all memory."""
        for tensors in (self._lost, self._loaded, self._of_servers):
            tensors.clear()


feedback = Feedback()
"""Feedback of this process."""
