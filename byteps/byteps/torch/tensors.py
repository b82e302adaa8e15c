"""What the engine needs to know of a torch tensor: its element type, memory, device and stream."""

from __future__ import annotations

import torch

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
"""The element types that servers can add."""


def check(tensor: torch.Tensor, what: str) -> None:
    """Demand a tensor that can be summed. `what` is its name in the error.

    Raises:
        TypeError: it is no tensor.
        ValueError: its type, layout, device or memory cannot be used.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        known = ", ".join(sorted(DTYPES.values()))
        raise ValueError(f"{what} is {tensor.dtype}; what can be summed is {known}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous; call .contiguous() first")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} is on {tensor.device}; only CPU and CUDA tensors can be summed")
    check_memory(tensor, what)


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises ValueError where the memory of a tensor was freed."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if (there := tensor.untyped_storage().nbytes()) < end:
        raise ValueError(
            f"{what} ends at byte {end:,} of a storage of {there:,} bytes: its memory was freed, "
            "as when buffers are offloaded; bring it back first"
        )


def check_wire_dtype(dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    """Raises ValueError where a tensor of `dtype` cannot be sent as `wire_dtype`."""
    if wire_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"wire_dtype is {wire_dtype}; it can be torch.bfloat16 or torch.float16")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a tensor of {dtype} cannot be sent as {wire_dtype}")


def device_number(device: torch.device) -> int:
    """The GPU's number; -1 for the CPU."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(device: torch.device) -> int:
    """The address of the device's current CUDA stream; 0 for the CPU.

    torch.cuda.current_stream makes an object for it, which takes 15 us in a thread that has slept.
    """
    number = device_number(device)
    return 0 if number < 0 else torch._C._cuda_getCurrentRawStream(number)
