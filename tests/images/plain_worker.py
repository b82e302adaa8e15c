"""A worker without torch: sums plain memory with the wheel's module, and checks every value.

For CPUs on which the import of torch is too slow. Arguments: bytes of the largest tensor. Exits
with 1 and the first wrong value.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import byteps

ROUNDS = 3


def _bfloat16(values: list[int]) -> bytes:
    """Take the upper halves of fp32 values, which are exact for small integers."""
    words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    return struct.pack(f"<{len(values)}H", *(word >> 16 for word in words))


def _packed(code: str) -> Callable[[list[int]], bytes]:
    return lambda values: struct.pack(f"<{len(values)}{code}", *values)


DTYPES: dict[str, tuple[int, Callable[[list[int]], bytes]]] = {
    "float32": (4, _packed("f")),
    "float64": (8, _packed("d")),
    "float16": (2, _packed("e")),
    "bfloat16": (2, _bfloat16),
    "uint8": (1, _packed("B")),
    "int8": (1, _packed("b")),
    "int32": (4, _packed("i")),
    "int64": (8, _packed("q")),
}
"""Bytes of an element, and the conversion of values."""


def load() -> ModuleType:
    """Load the engine's module from Python's path without its package, which imports torch."""
    assert byteps.__file__ is not None
    folder = Path(byteps.__file__).parent / "torch"
    spec = importlib.machinery.PathFinder.find_spec("c_lib", [str(folder)])
    assert spec is not None and spec.loader is not None, f"no module c_lib in {folder}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def value(rank: int, index: int, round_: int, seed: int) -> int:
    """Compute a small value, so that sums over a few ranks are exact in every dtype."""
    return (index * 7 + rank * 5 + round_ * 3 + seed) % 29


def sum_once(engine: ModuleType, name: str, dtype: str, count: int, round_: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    width, pack = DTYPES[dtype]
    seed = len(name)
    given = ctypes.create_string_buffer(
        pack([value(rank, i, round_, seed) for i in range(count)]), count * width
    )
    sums = ctypes.create_string_buffer(count * width)
    handle = engine.push_pull(
        name=name, dtype=dtype, input=ctypes.addressof(given), output=ctypes.addressof(sums),
        bytes=count * width, average=False, priority=0, group=[], placement=None, pull=None,
        device=-1, stream=0,
    )  # fmt: skip
    engine.wait(handle)
    want = [sum(value(r, i, round_, seed) for r in range(size)) for i in range(count)]
    expected = pack(want)
    for at in range(0, len(expected), width):
        got = sums.raw[at : at + width]
        if got != expected[at : at + width]:
            sys.exit(
                f"{name}, round {round_}, value {at // width}: {got!r}, not {want[at // width]}"
            )


def main() -> None:
    engine = load()
    engine.init(num_servers=0)
    largest = int(sys.argv[1])
    tensors = 0
    for dtype, (width, _) in DTYPES.items():
        for count in (1, 7, largest // width):
            for round_ in range(ROUNDS):
                sum_once(engine, f"{dtype}.{count}", dtype, count, round_)
            tensors += 1
    engine.shutdown(False)
    print(f"{platform.machine()}: {tensors} tensors, {ROUNDS} rounds, every value right")


if __name__ == "__main__":
    main()
