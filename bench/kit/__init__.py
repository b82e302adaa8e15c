"""What benchmarks share: emulated hosts, processes on them, plans, machines and units."""
