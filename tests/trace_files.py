"""Trace files in the product's own columns, as tests write them."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

from livescale.load.formats import OWN_COLUMNS
from livescale.load.traces import TraceRow
from livescale.values.units import NS_PER_S


def write_trace(path: Path, rows: Sequence[TraceRow]) -> None:
    """Write the rows so that `read_trace` gives them back; gzipped if the name ends in .gz.

    The same rows give the same bytes.
    """
    lines = [",".join(OWN_COLUMNS)]
    for row in rows:
        seconds, rest_ns = divmod(row.arrival_ns, NS_PER_S)
        lines.append(f"{seconds}.{rest_ns:09d},{row.input_tokens},{row.output_tokens}")
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
