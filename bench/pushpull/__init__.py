"""Push-pull next to other ways to all-reduce: what bench/pushpull_bench.py is made of."""
