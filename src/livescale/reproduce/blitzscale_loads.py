"""BlitzScale's claims about traces, about how long inference takes, and about cloud instances."""

from livescale.latency.shapes import PRESETS
from livescale.reproduce.claim import Conditions, Curve, Measured, Picture
from livescale.reproduce.models import cluster_of, layers_of, prefill_ms
from livescale.reproduce.multicasts import GBIT_BYTES, NS_PER_S
from livescale.topology import Topology
from livescale.traces import TraceRow

_STEP_TRACE = "burstgpt1_744286_72s"
_WINDOW_NS = 2 * NS_PER_S

CLOUD_INSTANCES = {
    "a2-ultragpu-8g": (2.58, 12.5),
    "p4d.24xlarge": (2.31, 100.0),
    "ml.hpcpni2.28xlarge": (4.0, 100.0),
    "p4de.24xlarge": (2.31, 100.0),
    "a3-highgpu-8g": (6.09, 100.0),
    "a3-megagpu-8g": (6.09, 200.0),
    "p5.48xlarge": (9.8, 400.0),
}
"""BlitzScale, Table 2: Gbit/s per GPU of the local SSD and of the network."""


def rate_burst(conditions: Conditions) -> Measured:
    """BlitzScale §1, Figure 1 (a): BurstGPT's rate of requests grows five-fold within two seconds.

    In the public excerpt with a step: requests of two seconds over those of the two before, which
    count as one if there was none; wherever the two begin.
    """
    rows = conditions.trace(_STEP_TRACE)
    figures = {"growth": max(_growth(rows, row.arrival_ns) for row in rows)}
    last_s = rows[-1].arrival_ns // NS_PER_S
    points = tuple(
        (float(s), float(_count(rows, s * NS_PER_S, NS_PER_S))) for s in range(last_s + 1)
    )
    curve = Curve("requests", points, is_step=True)
    return Measured(figures, (Picture("BurstGPT: arrivals", "time (s)", "per second", (curve,)),))


def inference_time(conditions: Conditions) -> Measured:
    """BlitzScale §1: inference of Llama3-8B takes 80 to 900 ms on an A800.

    The prompt's length is not given; from 500 to 12,000 tokens the analytic model should take 39 ms
    to 1.0 s.
    """
    lengths = (500, 1000, 2000, 4000, 6000, 8000, 10_000, 12_000)
    times = {tokens: prefill_ms("a800", "llama-3-8b", tokens) for tokens in lengths}
    figures = {"ms_at_500": times[500], "ms_at_12000": times[12_000]}
    curve = Curve("Llama-3-8B, A800", tuple((float(t), ms) for t, ms in times.items()))
    picture = Picture("Time to the first token of one prompt", "tokens", "ms", (curve,))
    return Measured(figures, (picture,))


def load_to_compute(conditions: Conditions) -> Measured:
    """BlitzScale §5.2, Figure 15: over 200 Gbit/s a layer of Llama2-7B takes six times as long to
    load as a prompt of 2,000 tokens takes to compute on it (Time_l)."""
    shape = PRESETS["llama-2-7b"]
    decoder_bytes = layers_of("llama-2-7b")[1]
    decoders = len(layers_of("llama-2-7b")) - 2
    layer_ms = prefill_ms("a800", shape.name, 2000) / decoders
    at_200, at_100 = (decoder_bytes / (gbit * GBIT_BYTES) * 1e3 / layer_ms for gbit in (200, 100))
    return Measured({"ratio": at_200, "ratio_at_100": at_100, "layer_ms": layer_ms})


def cloud_bandwidths(conditions: Conditions) -> Measured:
    """BlitzScale Table 2: local SSDs of 2.31 to 9.8 Gbit/s and networks of 12.5 to 400 Gbit/s per
    GPU, in the clusters that LiveScale brings along."""
    apart, ssds, networks = 0, [], []
    for name, (ssd, network) in CLOUD_INSTANCES.items():
        its_ssd, its_network = _rates_per_device(cluster_of(name).topology)
        apart += (round(its_ssd, 4), round(its_network, 4)) != (ssd, network)
        ssds.append(its_ssd)
        networks.append(its_network)
    return Measured(
        {
            "types": len(CLOUD_INSTANCES),
            "types_apart": apart,
            "ssd_min": min(ssds),
            "ssd_max": max(ssds),
            "network_min": min(networks),
            "network_max": max(networks),
        }
    )


# -- helpers --------------------------------------------------------------------------------------


def _count(rows: list[TraceRow], from_ns: int, length_ns: int) -> int:
    return sum(from_ns <= row.arrival_ns < from_ns + length_ns for row in rows)


def _growth(rows: list[TraceRow], at_ns: int) -> float:
    before = _count(rows, at_ns - _WINDOW_NS, _WINDOW_NS) if at_ns >= _WINDOW_NS else 0
    return _count(rows, at_ns, _WINDOW_NS) / max(before, 1)


def _rates_per_device(topology: Topology) -> tuple[float, float]:
    """Gbit/s of local storage and of the NIC, per device of the first host."""
    host = next(iter(topology.agents.values()))
    devices = [device for device in topology.devices.values() if device.host == host.name]
    storage, nic = host.storage_bytes_per_s, devices[0].uplink_bytes_per_s
    assert storage is not None, f"{host.name}: its storage is in the file"
    assert nic is not None, f"{host.name}: its network is in the file"
    return storage / GBIT_BYTES / len(devices), nic / GBIT_BYTES
