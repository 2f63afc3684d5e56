"""Benchmarks: ratios taken in one run. Only the command line imports this package."""
