"""Whole training steps: what bench/train_bench.py is made of, and its suite."""
