"""All latency models there are, as one type that can be written down and read again."""

from __future__ import annotations

from livescale.latency.linear import LinearLatency
from livescale.latency.overhead import OverheadLatency
from livescale.latency.roofline import RooflineLatency
from livescale.latency.table import TableLatency

AnyLatency = LinearLatency | RooflineLatency | TableLatency | OverheadLatency
