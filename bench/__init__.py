"""Benchmarks, one folder each. `kit` has the code that they share."""
