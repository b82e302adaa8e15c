"""Measures the RDMA transport in a guest; see bench/rdma_bench.py."""
