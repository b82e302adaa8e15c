"""What bench/pushpull_bench.py is made of: processes on emulated hosts, measurements, tables."""
