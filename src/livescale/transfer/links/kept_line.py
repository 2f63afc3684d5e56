"""For how long a downlink is kept for the parcels that are coming on it. Pure: times are arguments.

How much is to come is known from a parcel's header. How fast it comes is not: its sender may give
others a share, or stop. So the line is kept for a moment at a time, and no more than a part of the
time is spent on a line that was kept for nothing.
"""

from __future__ import annotations

from livescale.transfer.carriers.token_bucket import NEXT_PARCEL_NS
from livescale.values.units import NS_PER_S

KEPT_NS_MAX = 20_000_000
"""How far ahead the line is kept, for what is to come."""
WASTED_NS_MAX = 20_000_000
"""What may be wasted at once; it takes `WASTE_PARTS` times as long until it may be wasted again."""
WASTE_PARTS = 10
# Shorter runs of parcels are over before a sender of parameters could take notice.
_LONG_NS = 2_000_000


class KeptLine:
    """Of a downlink of `bytes_per_s`. Times never go back. Not thread-safe.

    Parcels that overlap or follow one another within a moment are one run.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        #: parameters wait until then
        self.until_ns = 0
        self._parcels = 0
        self._awaited_bytes = 0
        # What was announced in the run, and when the last parcel ended.
        self._run_bytes = 0
        self._ended_ns = 0
        self._patience_ns = WASTED_NS_MAX
        self._has_given_up = False
        self._seen_ns = 0

    @property
    def is_long(self) -> bool:
        """The run is worth a word to those who send parameters."""
        return self._line_ns(self._run_bytes) >= _LONG_NS

    def begins(self, size_bytes: int, now_ns: int) -> bool:
        """A parcel of so many bytes is coming. True if the line is kept for longer now."""
        self._pass(0, now_ns)
        if not self._parcels and now_ns - self._ended_ns > NEXT_PARCEL_NS:
            self._run_bytes = 0
        self._parcels += 1
        self._awaited_bytes += size_bytes
        self._run_bytes += size_bytes
        return self._keep(now_ns)

    def came(self, size_bytes: int, now_ns: int) -> bool:
        """So many bytes of parcels have come. True if the line is kept for longer now."""
        self._pass(size_bytes, now_ns)
        self._awaited_bytes -= size_bytes
        return self._keep(now_ns)

    def ends(self, missing_bytes: int, now_ns: int) -> None:
        """A parcel is over; so much of it never comes. Behind the last one the line is kept for
        the next one for a moment."""
        self._pass(0, now_ns)
        self._parcels -= 1
        self._awaited_bytes -= missing_bytes
        self._ended_ns = now_ns
        if not self._parcels:
            self.until_ns = now_ns if self._has_given_up else now_ns + self._tail_ns()

    def _keep(self, now_ns: int) -> bool:
        if self._has_given_up or self.until_ns - now_ns > KEPT_NS_MAX // 2:
            return False
        rest_ns = min(self._line_ns(self._awaited_bytes), KEPT_NS_MAX)
        self.until_ns = max(self.until_ns, now_ns + rest_ns + self._tail_ns())
        return True

    def _tail_ns(self) -> int:
        return min(NEXT_PARCEL_NS, self._line_ns(self._run_bytes))

    def _pass(self, used_bytes: int, now_ns: int) -> None:
        """Patience is spent on time in which the line was kept and carried no parcels."""
        passed_ns = now_ns - self._seen_ns
        kept_ns = max(0, min(now_ns, self.until_ns) - self._seen_ns)
        self._seen_ns = now_ns
        patience_ns = self._patience_ns + passed_ns // WASTE_PARTS - kept_ns
        if kept_ns:
            patience_ns += self._line_ns(used_bytes) * kept_ns // passed_ns
        self._patience_ns = min(patience_ns, WASTED_NS_MAX)
        if self._patience_ns <= 0:
            self._has_given_up = True
        elif self._patience_ns >= WASTED_NS_MAX // 2:
            self._has_given_up = False

    def _line_ns(self, size_bytes: int) -> int:
        return size_bytes * NS_PER_S // self._bytes_per_s

    def __repr__(self) -> str:
        state = ", not kept" if self._has_given_up else ""
        return f"<KeptLine {self._parcels} parcels, {self._awaited_bytes} bytes to come{state}>"
