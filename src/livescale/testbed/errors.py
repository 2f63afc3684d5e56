"""What stops a testbed."""


class TestbedError(Exception):
    """The testbed cannot be built or used; the message says what is missing or wrong."""

    __test__ = False  # pytest takes every class Test… for one of its own
