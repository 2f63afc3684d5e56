"""What stops a benchmark."""


class BenchError(Exception):
    """The benchmark cannot be run or its figures would mean nothing; the message says why."""
