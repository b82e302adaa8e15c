"""What bench/plan_bench.py needs."""
