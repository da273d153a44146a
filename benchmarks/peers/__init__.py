"""Ours and other engines under the same workloads: what `benchmarks/compare.py` runs."""
