"""A lease: of several controllers at most one believes to hold it, whatever is late.

It is a record in a store that all of them reach, and that replaces it only for a writer that has
read its last version. Clocks are never compared: the holder counts from before it wrote, a waiting
head from after it has read that version for the first time, each by a clock of its own. Every
holder's record has the next epoch, so what a holder that was stopped still sends can be told from
what is sent later.
"""

from __future__ import annotations

from livescale.values.types import Value

_PARTS_PER_TERM = 4


class LeaseRecord(Value, frozen=True):
    """What lies in the store. `holder` "": it was given back. A holder's `epoch` is one more than
    the one's before."""

    holder: str
    epoch: int


class LeaseTerms(Value, frozen=True):
    """A holder may act for `term_ns` after it has begun to renew. The clocks of two candidates run
    apart by at most `drift_permille` of the time."""

    term_ns: int
    drift_permille: int = 50

    @property
    def believed_ns(self) -> int:
        """For so long by its own clock a holder believes that it holds the lease."""
        return self.term_ns * (1000 - self.drift_permille) // 1000

    @property
    def waited_ns(self) -> int:
        """For so long by its own clock a waiting head must have read one version."""
        return -(-self.term_ns * (1000 + self.drift_permille) // 1000)

    @property
    def renewal_ns(self) -> int:
        """How often a holder renews, and a waiting head reads."""
        return max(1, self.term_ns // _PARTS_PER_TERM)


class LeaseClaim:
    """One candidate's side. Times are by its own clock, which may not stand still while the machine
    is suspended. `read` or `write` follows every trial that the store answered."""

    def __init__(self, holder: str, terms: LeaseTerms, epoch_min: int = 1) -> None:
        """`holder` names this life of the candidate, and no other. Its epoch will be `epoch_min` at
        least."""
        if not holder:
            raise ValueError("a candidate for a lease has a name")
        self.terms = terms
        self._holder = holder
        self._epoch_min = epoch_min
        self._record: LeaseRecord | None = None
        #: what the store must still have ("": nothing; None: to be read)
        self._version: str | None = None
        #: when this version was seen first
        self._seen_ns = 0
        #: since then it is this candidate's (None: it is not)
        self._held_since_ns: int | None = None

    @property
    def epoch(self) -> int:
        """Of the record that was seen or written last."""
        return 0 if self._record is None else self._record.epoch

    @property
    def holder(self) -> str:
        """Who has it, as far as this candidate has seen."""
        return "" if self._record is None else self._record.holder

    def holds(self, now_ns: int) -> bool:
        """This candidate may act."""
        since_ns = self._held_since_ns
        return since_ns is not None and now_ns - since_ns < self.terms.believed_ns

    def read(self, record: LeaseRecord | None, version: str, returned_ns: int) -> None:
        """The store had this (None: nothing yet), by an answer that came at `returned_ns`."""
        # Of a write whose answer was lost nothing is known but that it came after the last one.
        is_own = record is not None and record == self._record and record.holder == self._holder
        if version != self._version and not is_own:
            self._seen_ns = returned_ns
            self._held_since_ns = None
        self._record, self._version = record, version

    def wanted(self, now_ns: int) -> tuple[LeaseRecord, str] | None:
        """What to write now in place of which version, to get the lease or to keep it (None:
        another one has it, or nothing was read yet)."""
        if self._version is None:
            return None
        record = self._record
        if self._held_since_ns is not None and record is not None:
            # A term that is over is begun anew: others may have acted, and be gone again.
            epoch = record.epoch if self.holds(now_ns) else record.epoch + 1
            return LeaseRecord(self._holder, epoch), self._version
        is_free = record is None or not record.holder
        if is_free or now_ns - self._seen_ns >= self.terms.waited_ns:
            return LeaseRecord(self._holder, max(self.epoch + 1, self._epoch_min)), self._version
        return None

    def written(self, record: LeaseRecord, version: str, sent_ns: int) -> None:
        """The store took the record, which was sent at `sent_ns`, and calls it `version`."""
        self._record, self._version, self._held_since_ns = record, version, sent_ns
        self._seen_ns = sent_ns

    def missed(self) -> None:
        """The store has another version, or it is not known what it has: to be read first. What
        this candidate holds it holds to the end of its term."""
        self._version = None

    def given_back(self) -> tuple[LeaseRecord, str] | None:
        """What to write so that others need not wait (None: it is not this candidate's)."""
        if self._held_since_ns is None or self._version is None:
            return None
        self._held_since_ns = None
        return LeaseRecord("", self.epoch), self._version

    def __repr__(self) -> str:
        return f"<LeaseClaim of {self._holder}, seen {self._record}>"
