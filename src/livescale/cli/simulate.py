"""`livescale simulate TRACE`: the production controller and Batcher in virtual time."""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path

import msgspec

from livescale.cli.errors import UserError
from livescale.cli.loads import add_load_arguments, choose_load, write_json
from livescale.control.multicast.planner import STRATEGIES
from livescale.placements import AllCopies, CacheCopies, NoCopies, Placement, SpreadCopies
from livescale.report.run_report import RunReport
from livescale.report.summary import summarize
from livescale.sim.config import SimConfig
from livescale.sim.presets import LLAMA_3_8B
from livescale.sim.simulate import SimResult, simulate
from livescale.slo import RequestTiming, SloError, parse_slo
from livescale.telemetry.record import RequestLine, read_record
from livescale.topology import Host
from livescale.traces import TraceError
from livescale.types import Outcome

_GBIT_BYTES = 125_000_000
_PLACEMENTS: dict[str, Placement] = {
    "spread": SpreadCopies(),
    "cache": CacheCopies(),
    "all": AllCopies(),
    "none": NoCopies(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace="TRACE", seconds=300, divide_lengths=1)
    parser.add_argument("--workers", type=int, default=8, help="workers of the pool")
    parser.add_argument("--link-gbit", type=float, default=100, help="rate of every link")
    parser.add_argument("--storage-gbit", type=float, default=10, help="rate of storage")
    parser.add_argument("--multicast", choices=STRATEGIES, default="auto", help="who sends to whom")
    words = "hosts with memory for copies, among which the workers are dealt (default: none)"
    parser.add_argument("--hosts", type=int, default=0, help=words)
    parser.add_argument("--host-memory-gb", type=float, default=192, help="of every host")
    words = "which host keeps what: " + ", ".join(_PLACEMENTS)
    parser.add_argument("--placement", choices=list(_PLACEMENTS), default="spread", help=words)
    parser.add_argument("--slo", default="5x-mean", help="'5x-mean' or 'ttft=450ms,tbt=150ms'")
    parser.add_argument("--record", type=Path, default=Path("runs/simulated.jsonl"))


def run(arguments: argparse.Namespace) -> int:
    """0 when every request ended well."""
    try:
        slo = parse_slo(arguments.slo)
        load = choose_load(arguments)
    except (TraceError, SloError) as error:
        raise UserError(str(error)) from error
    config = _config(arguments)
    print(
        f"pool: {config.workers} simulated A800 workers, {LLAMA_3_8B.name}"
        f" ({LLAMA_3_8B.size_bytes / 1e9:.1f} GB), links of {arguments.link_gbit:g} Gbit/s"
    )
    # As in a real pool, the first instance is there before the load begins.
    storage = config.controller.remote_storage_bytes_per_s
    assert storage is not None
    lead_ns = LLAMA_3_8B.size_bytes * 1_000_000_000 // storage
    lead_ns += config.controller.settle_ns
    rows = [msgspec.structs.replace(row, arrival_ns=row.arrival_ns + lead_ns) for row in load.rows]
    record = io.BytesIO()
    started_s = time.monotonic()
    result = simulate(rows, config, arguments.seed, record)
    elapsed_s = time.monotonic() - started_s
    _write(arguments.record, record.getvalue())
    timings = [_timing(line) for line in result.requests]
    summary = summarize(timings, slo)
    report = RunReport(
        load.name, list(read_record(arguments.record)), summary, lead_ns, arguments.slo
    )
    print()
    print(report.text())
    print(_speed(result, elapsed_s))
    print(f"record    {arguments.record}")
    if arguments.json is not None:
        write_json(arguments.json, report.as_json())
    return 0 if summary.failed == 0 else 1


# -- helpers, in the order used -------------------------------------------------------------------


def _config(arguments: argparse.Namespace) -> SimConfig:
    if arguments.workers < 1 or min(arguments.link_gbit, arguments.storage_gbit) <= 0:
        raise UserError("--workers, --link-gbit and --storage-gbit must be positive")
    if arguments.hosts < 0 or arguments.host_memory_gb <= 0:
        raise UserError("--hosts must not be negative and --host-memory-gb must be positive")
    config = SimConfig.default(LLAMA_3_8B, workers=arguments.workers)
    link = int(arguments.link_gbit * _GBIT_BYTES)
    storage = int(arguments.storage_gbit * _GBIT_BYTES)
    device = msgspec.structs.replace(
        config.devices[0], uplink_bytes_per_s=link, downlink_bytes_per_s=link
    )
    memory_bytes = int(arguments.host_memory_gb * 1e9)
    leaf = device.leaf
    hosts = tuple(Host(f"host-{n}", leaf, memory_bytes, link, link) for n in range(arguments.hosts))
    controller = msgspec.structs.replace(
        config.controller,
        agents_expected=len(hosts),
        multicast=arguments.multicast,
        placement=_PLACEMENTS[arguments.placement],
        remote_storage_bytes_per_s=storage,
    )
    return msgspec.structs.replace(
        config, controller=controller, devices=(device,) * config.workers, hosts=hosts
    )


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def _timing(line: RequestLine) -> RequestTiming:
    return RequestTiming(
        request=line.request,
        scheduled_ns=line.queued_ns,
        sent_ns=line.queued_ns,
        token_ns=line.token_ns,
        finished_ns=line.finished_ns,
        ok=line.outcome is Outcome.FINISHED,
    )


def _speed(result: SimResult, elapsed_s: float) -> str:
    virtual_s = result.end_ns / 1e9
    return (
        f"simulated {virtual_s:.0f} s in {elapsed_s:.1f} s ({virtual_s / elapsed_s:.0f} x real"
        f" time), {result.steps} steps of the controller"
    )
