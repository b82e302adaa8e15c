"""Imports Megatron-Bridge when it is itself imported, for the process from which ranks are
forked."""

from __future__ import annotations

from .bridge import auto_bridge

auto_bridge()
