"""What benchmarks share: processes that answer by lines, models to make, the machine."""
