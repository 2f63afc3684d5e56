"""Nanoseconds and bytes per second, in which times and rates are counted, in the units that people
use."""

from __future__ import annotations

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
GBIT_BYTES = 125_000_000
"""Of a link of 1 Gbit/s, in a second."""
