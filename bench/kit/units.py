"""Sizes, link rates and times: as users write them, and as tables show them."""

from __future__ import annotations

import re

_SIZES = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def _scaled(text: str, units: dict[str, int], example: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise ValueError(f"{text!r} is not understood: write it like {example}")
    value = float(match.group(1)) * units[unit]
    if value < 1 or value != int(value):
        raise ValueError(f"{text!r} is not a whole, positive number")
    return int(value)


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``64KiB``, ``1.5MiB`` or ``1GB`` (a GB is 1e9). Raises ValueError."""
    return _scaled(text, _SIZES, "64KiB, 256MiB or 1GB")


def parse_rate(text: str) -> int:
    """Bits a second of ``500mbit``, ``2.5gbit``. Raises ValueError."""
    return _scaled(text, _RATES, "500mbit or 1gbit")


def parse_hosts(text: str) -> tuple[int, int]:
    """Of ``8@500mbit``: how many hosts, and their links' bits per second. Raises ValueError."""
    count, at, rate = text.partition("@")
    if not at or not count.isdigit() or int(count) < 1:
        raise ValueError(f"--emulate {text!r} is not understood: write it like 8@500mbit")
    return int(count), parse_rate(rate)


def sweep(smallest: int, largest: int, factor: float) -> list[int]:
    """Sizes from the smallest on, each ``factor`` times the last, none above the largest."""
    if factor <= 1:
        raise ValueError(f"--factor must be larger than 1, not {factor:g}")
    if smallest > largest:
        raise ValueError(f"--min {smallest} is larger than --max {largest}")
    sizes, size = [], float(smallest)
    while round(size) <= largest:
        sizes.append(round(size))
        size *= factor
    return sizes


def show_size(count: int) -> str:
    """The shortest exact way to write that many bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count % scale == 0 and count:
            return f"{count // scale}{unit}"
    return f"{count}B"


def show_rate(bits: int) -> str:
    """The shortest exact way to write that many bits per second."""
    for unit, scale in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if bits % scale == 0 and bits:
            return f"{bits // scale}{unit}"
    return f"{bits}bit"
