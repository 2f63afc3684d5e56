"""Systems for comparison: what the papers compare with, as settings of one and the same pool.

Every system runs the same engine, the same policy and the same load; it differs in how parameters
come to a device, in which host keeps them, in what a new instance does until they are there, and in
whether instances are added at all.
"""

from __future__ import annotations

import difflib
import re

import msgspec

from livescale.placements import AllCopies, CacheCopies, NoCopies, Placement, SpreadCopies
from livescale.slo import TIME, exact_ns
from livescale.types import Value

_NS_PER_S = 1_000_000_000
_COUNT = re.compile(r"[1-9]\d{0,5}")


class UnknownSystem(ValueError):
    """There is no system of that name, or its parameter cannot be read."""


class System(Value, frozen=True):
    """One way to run a pool.

    `multicast`, `placement` and `live_order` are the controller's settings. `load_ns` replaces
    transfers to devices by a fixed time. A system with `fixed_percent` never scales: that share of
    the pool's instances is always there (`fixed_instances`: so many of each model). Who receives
    from another member waits `group_setup_ns` before the first byte. Workers keep first layers of
    models that they gave up in `resident_percent` of the largest model's size, which KV lacks.
    """

    name: str
    sentence: str
    multicast: str = "auto"
    placement: Placement = SpreadCopies()
    live_order: str = "stop-the-world"
    load_ns: int | None = None
    group_setup_ns: int = 0
    resident_percent: int = 0
    fixed_percent: int | None = None
    fixed_instances: int | None = None

    @property
    def is_fixed(self) -> bool:
        return self.fixed_percent is not None or self.fixed_instances is not None

    @property
    def file_name(self) -> str:
        """The name where it becomes a file's."""
        return self.name.replace(":", "-")


_GROUP_SETUP_NS = 200_000_000
"""Forming a communication group: 100 ms in BlitzScale's Figure 23, "up to hundreds of milliseconds"
in λScale §7.2."""

_ALL = (
    System(
        "livescale",
        "the best multicast by prediction, one host copy of each model, live from the first layer"
        " on (ZigZag)",
        live_order="zigzag",
    ),
    System(
        "livescale-resident",
        "livescale, and workers keep half of the layers of a model that they gave up",
        live_order="zigzag",
        resident_percent=60,
    ),
    System("livescale-stop", "livescale, but new instances serve when everything is there"),
    System(
        "best-effort",
        "livescale, but a new instance runs what it has of each batch once (BlitzScale Figure 15)",
        live_order="best-effort",
    ),
    System(
        "overlap",
        "livescale, but a new instance runs layers as they arrive and helps nobody (PipeSwitch)",
        live_order="overlap",
    ),
    System(
        "serverlessllm",
        "host memory keeps what its devices loaded for 5 min (BlitzScale, Figure 4), else storage",
        multicast="host",
        placement=CacheCopies(ttl_ns=300 * _NS_PER_S),
    ),
    System(
        "serverlessllm-30s",
        "the same for 30 s, as in the code of BlitzScale's authors",
        multicast="host",
        placement=CacheCopies(ttl_ns=30 * _NS_PER_S),
    ),
    System(
        "allcache",
        "every host keeps every model: devices load from their own host's memory",
        multicast="host",
        placement=AllCopies(),
    ),
    System("fixed-full", "the whole pool serves all the time", fixed_percent=100),
    System("fixed-half", "half of the pool serves all the time", fixed_percent=50),
    System("fixed", "N instances of each model serve all the time (fixed:N)", fixed_instances=1),
    System("unicast", "one copy sends to every new instance over the network", multicast="unicast"),
    System("tree", "a binary tree (FaaSNet)", multicast="tree"),
    System(
        "nccl",
        f"a broadcast in a chain, after {_GROUP_SETUP_NS // 1_000_000} ms to form its group",
        multicast="chain",
        group_setup_ns=_GROUP_SETUP_NS,
    ),
    System("binomial", "the binomial pipeline of blocks (λScale)", multicast="binomial"),
    System("storage", "every device reads storage", multicast="storage", placement=NoCopies()),
    System("ideal", "parameters are there at once: what scaling alone could do", load_ns=0),
    System("fixed-delay", "each load takes 1 s (fixed-delay:2s: another time)", load_ns=_NS_PER_S),
)
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}


def find_system(text: str) -> System:
    """The system of that name; "fixed-delay:2s" and "fixed:6" carry a parameter.

    Raises UnknownSystem.
    """
    name, colon, parameter = text.partition(":")
    system = SYSTEMS.get(name)
    if system is None:
        near = difflib.get_close_matches(name, SYSTEMS, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise UnknownSystem(f"there is no strategy '{text}'{hint}: {', '.join(SYSTEMS)}")
    if not colon:
        return system
    if name == "fixed-delay":
        found = re.fullmatch(TIME, parameter)
        if found is None:
            hint = "write a time, as in fixed-delay:2s or fixed-delay:250ms"
            raise UnknownSystem(f"'{text}': {hint}")
        delay_ns = exact_ns(found[1], found[2])
        sentence = f"each load takes {parameter}"
        return msgspec.structs.replace(system, name=text, sentence=sentence, load_ns=delay_ns)
    if name == "fixed":
        if _COUNT.fullmatch(parameter) is None:
            raise UnknownSystem(f"'{text}': write a number of instances, as in fixed:6")
        sentence = f"{parameter} instances of each model serve all the time"
        count = int(parameter)
        return msgspec.structs.replace(system, name=text, sentence=sentence, fixed_instances=count)
    raise UnknownSystem(f"'{text}': only fixed-delay:TIME and fixed:N have a parameter")
