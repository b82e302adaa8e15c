"""Assembles patched upstream trees: fetch by hash, overlay, patch series, and back again."""
