"""Trains every layout in two ways, compares the runs, and writes what came out as tables."""
