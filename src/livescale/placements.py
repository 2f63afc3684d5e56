"""Which hosts keep copies of which models in their memory: strategies as values.

Ground floor: what is configured. What they suggest stands in `control/placement.py`; the
ParameterPool decides.
"""

from livescale.types import Value


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


Placement = SpreadCopies | CacheCopies | AllCopies | NoCopies
