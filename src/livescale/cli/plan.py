"""`livescale plan`: what the planner would do on a cluster that a file describes, in words."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from decimal import Decimal
from pathlib import Path

import msgspec

from livescale.cli.loads import whole_bytes, write_json
from livescale.clusters.files import NamedTopology, read_topology
from livescale.clusters.topology import Direction, LinkKind, LinkUse
from livescale.common.errors import UserError
from livescale.common.settings import BYTES_MAX, ConfigError, amount_of_bytes, size_text
from livescale.control.multicast.bound import Bound, lower_bound
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.planner import STRATEGIES, free_uplinks, make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.latency.shapes import LLAMA_3_8B
from livescale.messages.scale_plan import ScalePlan
from livescale.report.plan_text import describe_plan
from livescale.values.types import ModelSpec, WorkerRef

_PRESETS = {LLAMA_3_8B.name: LLAMA_3_8B}
_PARAMETER_BYTES = 2
_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)B")
_LAYERS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--topology", type=Path, required=True, metavar="FILE", help="Topology file (YAML).")
    words = f"Folder of a model, {', '.join(_PRESETS)}, parameters in bf16 (8B) or bytes (16GB)."
    add("--model", required=True, help=words)
    add("--layers", type=int, help=f"Layers of a model given by its size (default: {_LAYERS}).")
    add(
        "--sources",
        default="",
        metavar="NAME,…",
        help="Workers and hosts with the model: w0, h1, host0/3 (default: storage).",
    )
    words = "Number of new instances, or the devices and hosts that load the model."
    add("--targets", required=True, metavar="N|NAME,…", help=words)
    add("--tp", type=int, default=1, help="Tensor-parallel ranks of an instance.")
    add("--strategy", choices=STRATEGIES, default="auto", help="Multicast strategy.")
    add(
        "--busy", default="", metavar="NAME:out,…", help="NIC directions in use by serving traffic."
    )
    add("--chunk", default="1MiB", help="Size of a chunk.")
    add("--json", type=Path, metavar="FILE", help="Write the plan to this file (JSON).")


def run(arguments: argparse.Namespace) -> int:
    named = read_topology(arguments.topology)
    asked = _request(arguments, named, _model(arguments))
    plan = make_plan(asked, named.topology, arguments.strategy)
    bound = _bound(asked, plan, named)
    print(describe_plan(plan, bound.ns if bound else None, bound.why if bound else ""))
    if arguments.json is not None:
        write_json(arguments.json, _as_json(plan, bound))
    return 0


# -- helpers, in the order used -------------------------------------------------------------------


def _model(arguments: argparse.Namespace) -> ModelSpec:
    """Sizes of one rank's layers."""
    text, tp, layers = arguments.model, arguments.tp, arguments.layers
    if tp < 1 or (layers is not None and layers < 1):
        raise UserError("--tp and --layers must be at least 1")
    if os.path.isdir(text) or text in _PRESETS:
        if layers is not None:
            raise UserError(f"--layers: {text} has its own")
        whole = _PRESETS.get(text) or model_spec(read_manifest(Path(text), Path(text).name))
        sizes = tuple(-(-size // tp) for size in whole.layer_bytes)
        return msgspec.structs.replace(whole, layer_bytes=sizes, tp_size=tp)
    found = _PARAMETERS.fullmatch(text)
    try:
        # "8B" is a number of parameters, as models are called; "8GB" is bytes.
        size = (
            amount_of_bytes(f"{int(Decimal(found[1]) * 10**9) * _PARAMETER_BYTES}", "--model")
            if found
            else amount_of_bytes(text, "--model")
        )
    except ConfigError:
        known = ", ".join(_PRESETS)
        raise UserError(
            f"--model {text!r} is no directory, no size such as 8B or 16GB (at most"
            f" {size_text(BYTES_MAX)}), and not {known}"
        ) from None
    count = layers or _LAYERS
    edges = [size * i // (count * tp) for i in range(count + 1)]
    sizes = tuple(b - a for a, b in itertools.pairwise(edges))
    return ModelSpec(text, sizes, 0, 0, tp)


def _request(arguments: argparse.Namespace, named: NamedTopology, model: ModelSpec) -> PlanRequest:
    tp = arguments.tp
    holders = [named.ref(name) for name in _listed(arguments.sources)]
    agents = tuple(Source((ref,) * tp) for ref in holders if ref.is_agent)
    copies = tuple(Source(group) for group in _groups(holders, tp, "--sources"))
    targets: tuple[tuple[WorkerRef, ...], ...] | None = None
    spare: tuple[WorkerRef, ...] = ()
    instances = 0
    if arguments.targets.isdecimal():
        instances = int(arguments.targets)
        spare = tuple(ref for ref in named.topology.devices if ref not in holders)
        if instances < 1 or instances * tp > len(spare):
            raise UserError(f"--targets {instances}: {len(spare)} devices are free, {tp} a target")
    else:
        wanted = [named.ref(name) for name in _listed(arguments.targets)]
        targets = _groups(wanted, tp, "--targets")
        targets += tuple((ref,) * tp for ref in wanted if ref.is_agent)
        instances = len(targets)
    return PlanRequest(
        plan=1,
        model=model.name,
        layer_bytes=model.layer_bytes,
        chunk_bytes=whole_bytes(arguments.chunk, "--chunk"),
        instances=instances,
        sources=copies + agents,
        spare=spare,
        targets=targets,
        tp_size=tp,
        busy=tuple(_use(text, named) for text in _listed(arguments.busy)),
    )


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _groups(refs: list[WorkerRef], tp: int, what: str) -> tuple[tuple[WorkerRef, ...], ...]:
    """The devices among `refs` as instances, in the order given."""
    devices = [ref for ref in refs if not ref.is_agent]
    if len(set(refs)) != len(refs):
        raise UserError(f"{what}: a device or host is named twice")
    if len(devices) % tp:
        raise UserError(f"{what}: {len(devices)} devices are no multiple of --tp {tp}")
    return tuple(tuple(devices[i : i + tp]) for i in range(0, len(devices), tp))


def _use(text: str, named: NamedTopology) -> LinkUse:
    name, _, direction = text.partition(":")
    if direction not in (Direction.OUT.value, Direction.IN.value):
        raise UserError(f"--busy {text!r}: write NAME:out or NAME:in")
    return LinkUse(LinkKind.NIC, str(named.ref(name)), Direction(direction))


def _bound(asked: PlanRequest, plan: ScalePlan, named: NamedTopology) -> Bound | None:
    receivers = [load.receiver for load in plan.loads]
    tp = asked.tp_size
    targets = [tuple(receivers[i : i + tp]) for i in range(0, len(receivers), tp)]
    sources = [source.workers for source in asked.sources]
    fabric = Fabric.of(asked, named.topology)
    return lower_bound(sources, targets, sum(asked.layer_bytes), fabric)


def _as_json(plan: ScalePlan, bound: Bound | None) -> dict[str, object]:
    return {
        "plan": msgspec.to_builtins(plan),
        "routes": list(plan.routes()),
        "predicted_ns": plan.predicted_ns,
        "lower_bound_ns": bound.ns if bound else None,
        "lower_bound": bound.why if bound else None,
        "serving_bytes": plan.serving_bytes,
        "free_uplinks": [str(ref) for ref in free_uplinks(plan)],
    }
