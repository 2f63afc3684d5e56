"""What a soak came to, for people and as figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.lab.bench.soak.faults import StruckFault
from livescale.lab.bench.soak.load import SoakEnd, SoakRequest

_SHOWN_MAX = 5


@dataclass(slots=True)
class SoakReport:
    """All that was seen. `broken` are connections that faults of the gateway broke (their requests
    were sent again), `left_out` faults that this machine cannot do, `left_over` requests that the
    pool still counted when all clients were gone. Growth is per 1,000 requests and kind of
    process."""

    requests: list[SoakRequest]
    left_out: tuple[str, ...]
    faults: list[StruckFault] = field(default_factory=list)
    broken: int = 0
    tokens: int = 0
    token_mismatches: int = 0
    rss_growth: dict[str, float] = field(default_factory=dict)
    descriptor_growth: dict[str, float] = field(default_factory=dict)
    left_over: int = 0
    elapsed_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Nothing was lost, hung or wrong, and every fault healed in time."""
        bad = self.count(SoakEnd.LOST) + self.count(SoakEnd.HUNG) + self.token_mismatches
        healed = all(fault.is_healed and not fault.is_late for fault in self.faults)
        return not bad and not self.left_over and healed

    def count(self, end: SoakEnd) -> int:
        return sum(request.end is end for request in self.requests)

    def as_json(self) -> dict[str, object]:
        healed = [fault.healed_s for fault in self.faults if fault.healed_s is not None]
        figures: dict[str, object] = {
            "requests": len(self.requests),
            "lost": self.count(SoakEnd.LOST),
            "hung": self.count(SoakEnd.HUNG),
            "left": self.count(SoakEnd.LEFT),
            "broken_with_the_gateway": self.broken,
            "left_over": self.left_over,
            "tokens": self.tokens,
            "token_mismatches": self.token_mismatches,
            "faults": len(self.faults),
            "healed": sum(fault.is_healed for fault in self.faults),
            "healed_late": sum(fault.is_late for fault in self.faults),
            "faults_left_out": list(self.left_out),
            "seconds": self.elapsed_s,
            "rss_growth_by_process": self.rss_growth,
            "descriptor_growth_by_process": self.descriptor_growth,
            "struck": [
                {"kind": f.kind, "what": f.what, "healed_s": f.healed_s, "whole_s": f.whole_s}
                | ({"problem": f.problem} if f.problem else {})
                for f in self.faults
            ],
        }
        if healed:
            figures["slowest_heal_s"] = max(healed)
        if self.rss_growth:
            figures["rss_growth_bytes_per_1000_requests"] = max(self.rss_growth.values())
        if self.descriptor_growth:
            figures["descriptor_growth_per_1000_requests"] = max(self.descriptor_growth.values())
        return figures

    def text(self) -> str:
        figures = self.as_json()
        lines = [
            f"requests      {len(self.requests)} in {self.elapsed_s:.0f} s,"
            f" lost: {figures['lost']}, hung: {figures['hung']};"
            f" {figures['left']} clients left, {self.broken} connections broke with the gateway",
            f"tokens        {self.tokens}, wrong: {self.token_mismatches}",
            f"faults        {len(self.faults)}, healed: {figures['healed']},"
            f" late: {figures['healed_late']}",
        ]
        if "slowest_heal_s" in figures:
            bound_s = max(fault.bound_s for fault in self.faults)
            lines.append(
                f"slowest heal  {figures['slowest_heal_s']:.1f} s, at most {bound_s:g} s are good"
            )
        if self.left_out:
            lines.append(f"not struck    {', '.join(self.left_out)}: this machine cannot do that")
        for kind, bytes_ in self.rss_growth.items():
            descriptors = self.descriptor_growth.get(kind, 0.0)
            lines.append(
                f"{kind:<13} {bytes_ / 1e6:+.2f} MB and {descriptors:+.1f} descriptors"
                " per 1,000 requests"
            )
        if self.left_over:
            lines.append(f"left over     {self.left_over} requests that the pool still counts")
        bad = [r for r in self.requests if r.end in (SoakEnd.LOST, SoakEnd.HUNG)]
        lines += [f"{r.end}          request {r.number}: {r.reason}" for r in bad[:_SHOWN_MAX]]
        return "\n".join(lines)


def fault_line(requests: int, fault: StruckFault) -> str:
    """One fault, when so many requests had been sent."""
    healed = "never healed" if fault.healed_s is None else f"healed after {fault.healed_s:.1f} s"
    whole = "not whole again" if fault.whole_s is None else f"whole after {fault.whole_s:.1f} s"
    late = ", late" if fault.is_late else ""
    problem = f"; {fault.problem}" if fault.problem else ""
    return f"{requests:>7}  {fault.kind:<10} {fault.what}: {healed}{late}, {whole}{problem}"
