"""How soon requests decode after prompts whose layers compute longer than their KV travels.

KV of a layer goes while later layers are computed, so the first decode Run waits for the KV of one
layer, and for the end of the Run that is in flight: it begins no later than both together after the
end of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from livescale.config.slo import percentile
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.kv.kv_scene import KvScene
from livescale.telemetry.record.record import AnyLine, RequestLine
from livescale.values.types import Outcome
from livescale.values.units import NS_PER_MS


@dataclass(frozen=True, slots=True)
class SecondTokens:
    """Of a played SecondTokenScene, in ns: what lies between first and second tokens, shortest
    first, the median `run_ns` between two later ones, and what a layer of a prompt takes to compute
    (`layer_ns`) and its KV on a link that carries nothing else."""

    gaps_ns: tuple[int, ...]
    run_ns: int
    layer_ns: int
    layer_kv_ns: int
    requests: int
    failed: int

    def begins_ratio(self, percent: int) -> float:
        """What passes from the first token until the first decode Run begins, over a layer's KV and
        a Run; a percentile of all requests. (That Run ends with the second token.)"""
        begins_ns = percentile(self.gaps_ns, percent) - self.run_ns
        return begins_ns / (self.layer_kv_ns + self.run_ns)

    def as_json(self) -> dict[str, object]:
        return {
            "second_token_p50_ms": percentile(self.gaps_ns, 50) / NS_PER_MS,
            "second_token_p90_ms": percentile(self.gaps_ns, 90) / NS_PER_MS,
            "second_token_max_ms": self.gaps_ns[-1] / NS_PER_MS,
            "run_ms": self.run_ns / NS_PER_MS,
            "layer_ms": self.layer_ns / NS_PER_MS,
            "layer_kv_ms": self.layer_kv_ns / NS_PER_MS,
            "decode_begins_p50": self.begins_ratio(50),
            "decode_begins_p90": self.begins_ratio(90),
            "decode_begins_max": self.begins_ratio(100),
            "requests": self.requests,
            "failed": self.failed,
        }


def read_second_tokens(scene: KvScene, lines: Iterable[AnyLine]) -> SecondTokens:
    """Raises BenchError where the scene has other prompts, or no request had three tokens."""
    layer_ns = scene.run_ns // (scene.spec.layers - 2)
    if layer_ns <= scene.layer_kv_ns:
        raise BenchError(f"a layer takes {layer_ns} ns, its KV {scene.layer_kv_ns} ns")
    requests = [line for line in lines if isinstance(line, RequestLine)]
    timed = [line for line in requests if len(line.token_ns) > 2]
    if not timed:
        raise BenchError(f"none of {len(requests)} requests had three tokens")
    return SecondTokens(
        gaps_ns=tuple(sorted(line.token_ns[1] - line.token_ns[0] for line in timed)),
        run_ns=int(median(gap for line in timed for gap in line.timing().tbt_ns[1:])),
        layer_ns=layer_ns,
        layer_kv_ns=scene.layer_kv_ns,
        requests=len(requests),
        failed=sum(line.outcome is not Outcome.FINISHED for line in requests),
    )
