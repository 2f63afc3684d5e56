"""What attacks did to a light client and to the gateway, for people and as figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.bench.engine_report import percentile

RATIO_MAX = 2.0
"""A light client's p99 TTFT beside an attack is at most so many times that of without."""
GATEWAY_BYTES_MAX = 200_000_000
"""The gateway's memory grows by this at most."""


@dataclass(slots=True)
class AttackFigures:
    """What was seen of one attack, all its windows together.

    `alone_ns` and `beside_ns` are the light client's TTFTs; `gateway_bytes` is the growth of the
    memory of the gateway and its children at most; `statuses` counts the attacker's answers
    ("closed": none), `failed` the light client's requests that were not answered whole.
    """

    name: str
    request_bytes: int
    gateway_bytes: int = 0
    alone_ns: list[int] = field(default_factory=list)
    beside_ns: list[int] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    offered: int = 0
    attacked_s: float = 0.0
    failed: int = 0
    light_5xx: int = 0
    gateway_cpu_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def p99_ratio(self) -> float:
        return _p99(self.beside_ns) / max(_p99(self.alone_ns), 1)

    @property
    def http_5xx(self) -> int:
        """Of the attacker and of the light client."""
        attacker = sum(count for status, count in self.statuses.items() if status.startswith("5"))
        return attacker + self.light_5xx

    @property
    def is_within(self) -> bool:
        """All bounds are kept."""
        return (
            self.p99_ratio <= RATIO_MAX
            and self.gateway_bytes <= GATEWAY_BYTES_MAX
            and not self.http_5xx
            and not self.failed
        )

    def as_json(self) -> dict[str, object]:
        attacked_s = max(self.attacked_s, 1e-9)
        return {
            "name": self.name,
            "p99_alone_ms": _p99(self.alone_ns) / 1e6,
            "p99_beside_ms": _p99(self.beside_ns) / 1e6,
            "p99_ratio": self.p99_ratio,
            "p50_alone_ms": _p50(self.alone_ns) / 1e6,
            "p50_beside_ms": _p50(self.beside_ns) / 1e6,
            "gateway_bytes": self.gateway_bytes,
            "gateway_cpu_share": self.gateway_cpu_s / attacked_s,
            "http_5xx": self.http_5xx,
            "light_failed": self.failed,
            "request_bytes": self.request_bytes,
            "offered_per_s": self.offered / attacked_s,
            "answered_per_s": sum(self.statuses.values()) / attacked_s,
            "statuses": self.statuses,
            "is_within": self.is_within,
            **({"errors": self.errors} if self.errors else {}),
        }


@dataclass(frozen=True, slots=True)
class AttacksReport:
    """All attacks. `shape` says what was run."""

    shape: dict[str, object]
    attacks: tuple[AttackFigures, ...]

    @property
    def is_good(self) -> bool:
        return all(attack.is_within for attack in self.attacks)

    def as_json(self) -> dict[str, object]:
        return {**self.shape, "attacks": [attack.as_json() for attack in self.attacks]}

    def text(self) -> str:
        lines = [
            f"{'attack':<28} {'alone':>9} {'beside':>9} {'ratio':>6} {'memory':>8} {'cpu':>5}"
            f" {'5xx':>4} {'offered/s':>9} {'answered/s':>10}  answers"
        ]
        for attack in self.attacks:
            figures = attack.as_json()
            lines.append(
                f"{attack.name:<28} {_p99(attack.alone_ns) / 1e6:>6.1f} ms"
                f" {_p99(attack.beside_ns) / 1e6:>6.1f} ms {attack.p99_ratio:>6.2f}"
                f" {attack.gateway_bytes / 1e6:>+5.0f} MB {figures['gateway_cpu_share']:>5.0%}"
                f" {attack.http_5xx:>4} {figures['offered_per_s']:>9.1f}"
                f" {figures['answered_per_s']:>10.1f}  {_answers(attack)}"
                + ("" if attack.is_within else "  <- out of bounds")
            )
        lines += [f"{attack.name}: {error}" for attack in self.attacks for error in attack.errors]
        return "\n".join(lines)


def _p99(ttft_ns: list[int]) -> int:
    return percentile(ttft_ns, 99) if ttft_ns else 0


def _p50(ttft_ns: list[int]) -> int:
    return percentile(ttft_ns, 50) if ttft_ns else 0


def _answers(attack: AttackFigures) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(attack.statuses.items()))
