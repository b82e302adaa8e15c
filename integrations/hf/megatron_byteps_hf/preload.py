"""Imports Megatron-Bridge as a side effect, in the process from which ranks are forked."""

from __future__ import annotations

from .bridge import auto_bridge

auto_bridge()
