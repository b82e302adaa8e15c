"""Kinds of arguments that the scripts share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
