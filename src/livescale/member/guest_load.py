"""What has come of the model that a guest wants, for who takes its layers, in order.

A load that fails is ordered again by the pool. Layers that were taken before stay taken; all others
come again.
"""

from __future__ import annotations

from livescale.messages.events import (
    AnyEvent,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
)


class GuestLoad:
    """Of one model, through all its loads. What the member reports goes into `absorb`."""

    def __init__(self, model: str) -> None:
        self.model = model
        #: of the model (None: nothing was ordered yet), and so many were taken
        self.layers: int | None = None
        self.taken = 0
        #: why nothing more will come (None: something may)
        self.problem: str | None = None
        self._identity = ""
        self._there: dict[int, None] = {}
        self._last_failure = ""

    def begin(self, layers: int, identity: str) -> None:
        """A load begins, of bytes that `identity` names."""
        if self.taken and identity != self._identity:
            self.end("its bytes changed while they came")
        self.layers, self._identity = layers, identity
        self._there.clear()

    def rewind(self) -> None:
        """The layers are taken again, from the first one on."""
        self.taken = 0

    def absorb(self, event: AnyEvent) -> None:
        """What the member tells the pool."""
        if isinstance(event, LayerArrived):
            self._there[event.layer] = None
        elif isinstance(event, HoldingFailed):
            self._there.clear()
            self._last_failure = event.reason
        elif isinstance(event, HoldingDropped):
            self._there.clear()

    def end(self, reason: str) -> None:
        """Nothing more will come. The first reason counts."""
        if self.problem is None:
            self.problem = f"model {self.model}: {reason}"

    @property
    def next_layer(self) -> int | None:
        """The layer to be taken now, which is there (None: it is not)."""
        return self.taken if self.taken in self._there else None

    @property
    def is_over(self) -> bool:
        """Every layer was taken."""
        return self.taken == self.layers

    def take(self) -> None:
        """`next_layer` is taken."""
        assert self.next_layer is not None, f"{self!r} has no layer to take"
        self.taken += 1

    def late(self, patience_s: float) -> str:
        """Why who waited so long for the next layer gives up."""
        if self.layers is None:
            words = f"the pool sent nothing within {patience_s:g} s"
        else:
            words = f"layer {self.taken} of {self.layers} did not come within {patience_s:g} s"
        failure = f" (the last load failed: {self._last_failure})" if self._last_failure else ""
        return f"model {self.model}: {words}{failure}"

    def __repr__(self) -> str:
        return f"<GuestLoad of {self.model}: {self.taken}/{self.layers} layers taken>"
