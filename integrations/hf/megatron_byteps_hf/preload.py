"""Imports Megatron-Bridge when it is itself imported: for a process that ranks are forked from."""

from __future__ import annotations

from .bridge import auto_bridge

auto_bridge()
