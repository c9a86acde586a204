"""Scripts that measure: each prints a table and ends in one JSON line. From the root: python -m benchmarks.NAME."""
