"""Benchmarks, a folder each. `kit` has their common code."""
