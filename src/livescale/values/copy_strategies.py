"""Which hosts keep copies of which models in their memory: strategies as values.

Ground floor: what is configured. What they suggest stands in `control/policy/placement.py`; the
ParameterPool decides.
"""

from __future__ import annotations

from livescale.values.types import Value


class SpreadCopies(Value, frozen=True, tag="spread"):
    """One copy of every model in the whole cluster, spread evenly (BlitzScale §5.3).

    So the cluster's memory always holds every model at O(1) per model. A copy is given up while a
    device holds the model and its host's memory is short, and restored before the last device
    copy goes.
    """


class CacheCopies(Value, frozen=True, tag="cache"):
    """Every host keeps what its devices loaded last, for a time (ServerlessLLM).

    Least recently used copies go first when memory is short; all go `ttl_ns` after their last use.
    Instances are placed on hosts with a copy where possible; a miss reads storage.
    """

    ttl_ns: int = 30_000_000_000


class AllCopies(Value, frozen=True, tag="all"):
    """Every host keeps every model (the papers' AllCache: an upper bound, not a system)."""


class NoCopies(Value, frozen=True, tag="none"):
    """No copies in host memory: what no device holds comes from storage."""


class KeyStageCopies(Value, frozen=True, tag="key-stages"):
    """Hosts keep the key stages of models whose stages scale by their queues (QUART §6.1).

    A host that has an instance of a key stage keeps a copy, also when the instance is gone. When
    copies would take more than `memory_percent` of a host's memory, the least recently used ones
    go. As with `SpreadCopies` the cluster's memory never gives up its last copy of a model; a last
    copy may take all of a host's memory.
    """

    memory_percent: int = 85

    def __post_init__(self) -> None:
        if not 0 <= self.memory_percent <= 100:
            raise ValueError(f"{self.memory_percent} percent of a host's memory")


Placement = SpreadCopies | CacheCopies | AllCopies | NoCopies | KeyStageCopies


def keeps_last(placement: Placement) -> bool:
    """The last copy in the cluster's memory stays. Other placements rely on storage alone."""
    return isinstance(placement, SpreadCopies | AllCopies | KeyStageCopies)
