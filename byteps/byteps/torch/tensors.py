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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor fills its range of memory, in whatever order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def flat_view(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """All elements of a dense tensor as they lie in memory, without its history.

    Raises:
        ValueError: the tensor is sparse or has holes. `what` is its name in the error.
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
