"""What can go wrong with a model: with its files, and while it computes."""

from __future__ import annotations

from livescale.common.errors import UserError

_SIGNS = ("CUDA", "cuBLAS", "CUBLAS", "can't allocate memory", "out of memory")
"""In the words of RuntimeErrors."""


class ModelError(UserError):
    """A model cannot be read or run; the message names the directory, file or tensor and why."""


def spoils_device(error: Exception) -> bool:
    """After it what a device computes, or what the pool knows of it, cannot be trusted: a broken
    rule of the pool's own, memory that is not there, an accelerator's error."""
    if isinstance(error, AssertionError | MemoryError):
        return True
    # torch's own classes: out of memory, errors of an accelerator. Without importing it.
    kinds = [kind.__module__.partition(".")[0] for kind in type(error).__mro__]
    words = str(error)
    return "torch" in kinds or any(sign in words for sign in _SIGNS)
