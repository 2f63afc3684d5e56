"""All latency models there are, as one type that can be written down and read again."""

from __future__ import annotations

from livescale.latency.linear import LinearLatency

AnyLatency = LinearLatency
