"""What stops a benchmark."""

from livescale.common.errors import UserError


class BenchError(UserError):
    """The benchmark cannot be run or its figures would mean nothing; the message says why."""
