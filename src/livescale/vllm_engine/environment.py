"""The environment that vLLM is imported in: set before, because vLLM reads it then."""

from __future__ import annotations

import logging
import os

_LOOPBACK = "127.0.0.1"

FIXED = {
    # The engine runs on the worker's main thread, not in a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Nothing listens on other interfaces.
    "VLLM_HOST_IP": _LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
    # What vLLM logs goes where this process logs: standard output is for the worker's status.
    "VLLM_CONFIGURE_LOGGING": "0",
}
DEFAULTS = {
    # Nothing is reported to anybody.
    "VLLM_NO_USAGE_STATS": "1",
    # Workers share the cores: vLLM would bind all of them to the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""These may be set otherwise."""


def set_environment(log_level: str) -> None:
    """To be called before vLLM is imported."""
    os.environ.update(FIXED)
    for name, text in DEFAULTS.items():
        os.environ.setdefault(name, text)
    # What vLLM warns of at its start is for those who look into it.
    levels = {"debug": logging.DEBUG, "info": logging.WARNING}
    logging.getLogger("vllm").setLevel(levels.get(log_level, logging.ERROR))
