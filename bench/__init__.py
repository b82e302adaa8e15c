"""Benchmarks: a folder each, and in kit what they share."""
