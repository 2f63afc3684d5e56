"""In which racks the controller takes machines to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from joiners import Joiner, closing
from pool_thread import LocalPool, wait_until

from livescale.messages.events import WorkerJoined
from livescale.telemetry.record.record import StepLine, read_record

pytestmark = pytest.mark.usefixtures("machine")


def leaves(record: Path) -> dict[str, str]:
    """Of the workers' hosts, by name: what they said last."""
    steps = [line for line in read_record(record) if isinstance(line, StepLine)]
    joined = [event for line in steps for event in line.events if isinstance(event, WorkerJoined)]
    return {event.device.host: event.device.leaf for event in joined}


@pytest.mark.long
def test_a_host_is_in_the_rack_that_it_names_else_the_files_else_the_heads(
    tiny_model: Path, tmp_path: Path
) -> None:
    racks = tmp_path / "racks.yaml"
    racks.write_text("listed: [bob, carol]\n")
    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 1\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=1,
        listen="127.0.0.1:0",
        rack="heads-own",
        racks=str(racks),
    ) as head:
        head.wait_ready()
        hosts = [
            Joiner(head, "alice", tmp_path),
            Joiner(head, "bob", tmp_path),
            Joiner(head, "carol", tmp_path, "--rack", "named"),
        ]
        with closing(*hosts):
            wait_until(lambda: head.gauge("workers") == 4, "all are there")
            racks.write_text("moved: [bob, dave]\n")
            late = Joiner(head, "dave", tmp_path)
            with closing(late):
                wait_until(lambda: head.gauge("workers") == 5, "the file was read anew")
        record = head.record
    assert leaves(record) == {
        "head": "heads-own",
        "alice": "heads-own",
        "bob": "listed",
        "carol": "named",
        "dave": "moved",
    }
