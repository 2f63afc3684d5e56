"""Systems for comparison: what the papers compare with, as settings of one and the same pool.

Every system runs the same engine and the same load; it differs in how parameters come to a device,
in which host keeps them, in what a new instance does until they are there, and in whether instances
are added at all. The product's own defaults are `livescale`; all that is compared with
`livescale-bounds` scales by the same bounds, so that the rest can be told apart.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from livescale.common.errors import UserError
from livescale.config.slo import TIME, exact_ns
from livescale.control.state.config import ANY_PAIR
from livescale.sim.base.config import EQUAL
from livescale.sim.pools.baseline import BASELINE, BASELINE_WORLD
from livescale.values.bindings import Binding, EarlyBinding, LateBinding
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.scaling_policies import SloAim
from livescale.values.types import Value
from livescale.values.units import NS_PER_S

_COUNT = re.compile(r"[1-9]\d{0,5}")
_TWO_COUNTS = re.compile(rf"({_COUNT.pattern})\+({_COUNT.pattern})")


class UnknownSystem(UserError):
    """There is no system of that name, or its parameter cannot be read."""


class System(Value, frozen=True):
    """One way to run a pool.

    `multicast`, `placement`, `live_order`, `teams`, `drain`, `binding`, `warm_spares` and
    `spares_ahead` are the controller's. `load_ns` replaces transfers to devices by a fixed time. A
    system with `fixed_percent` never scales: that share of the pool's instances is always there
    (`fixed_instances`: so many of each model; `fixed_roles`: so many that prefill and so many that
    decode; `fixed_devices`: as many as so many devices hold; `fixed_like`: the device time of the
    system of that name, which `equal_time` turns into devices). Who receives from another member
    waits `group_setup_ns` before the first byte. Workers keep first layers of models that they gave
    up in `resident_percent` of the largest model's size, which KV lacks. `aim` replaces the bounds
    on queued prefill work that models scale by. `controller` and `world` are fields of
    ControllerConfig and SimConfig that do not follow the product's defaults.
    """

    name: str
    sentence: str
    multicast: str = "auto"
    placement: Placement = SpreadCopies()
    live_order: str = "stop-the-world"
    teams: str | None = None
    drain: str = "finish"
    binding: Binding = LateBinding()
    load_ns: int | None = None
    group_setup_ns: int = 0
    resident_percent: int = 0
    warm_spares: str = "off"
    spares_ahead: bool = False
    fixed_percent: int | None = None
    fixed_instances: int | None = None
    fixed_roles: tuple[int, int] | None = None
    fixed_devices: int | None = None
    fixed_like: str | None = None
    aim: SloAim | None = None
    controller: Mapping[str, object] = {}
    world: Mapping[str, object] = {}

    @property
    def is_fixed(self) -> bool:
        sizes = (
            self.fixed_percent,
            self.fixed_instances,
            self.fixed_roles,
            self.fixed_devices,
            self.fixed_like,
        )
        return any(size is not None for size in sizes)

    @property
    def file_name(self) -> str:
        """The name where it becomes a file's."""
        return self.name.replace(":", "-").replace("=", "-").replace(EARLY, "-early")


_Kind = TypeVar("_Kind", bound=System)
EARLY = "+early"
"""Behind a system's name: requests are bound early there."""
_GROUP_SETUP_NS = 200_000_000
"""Forming a communication group: 100 ms in BlitzScale's Figure 23, "up to hundreds of milliseconds"
in λScale §7.2."""


def like(system: _Kind, name: str, sentence: str, **changed: object) -> _Kind:
    """Another system, which differs from that one in these fields."""
    return msgspec.structs.replace(system, name=name, sentence=sentence, **changed)


_LIVESCALE = System(
    "livescale",
    "what a pool does by default: the best multicast by prediction, one host copy of each"
    " model, live from the first layer on (ZigZag), parameters are on devices before they are"
    " needed and stay there, scaling keeps queues short, requests of instances that go move",
    live_order="zigzag",
    drain="move",
    warm_spares="needed",
    spares_ahead=True,
    aim=SloAim(),
)
_ON_DEMAND = like(
    _LIVESCALE,
    "livescale-on-demand",
    "livescale, but devices get parameters when an instance is needed",
    spares_ahead=False,
)
_BOUNDS = System(
    "livescale-bounds",
    "the same data plane, but scaling by bounds, devices get parameters when an instance is"
    " needed, and requests of instances that go end there",
    live_order="zigzag",
    warm_spares="recent",
)
_INTERFERING = like(
    _BOUNDS,
    "livescale-interfering",
    "livescale-bounds, but plans do not avoid links that rows and KV cross",
    controller={"avoids_serving": False},
)
_STOP = System(
    "stop",
    "a baseline that stays as it is: new instances serve when everything is there",
    controller=BASELINE,
    world=BASELINE_WORLD,
)
_TREE = System("tree", "a binary tree (FaaSNet)", multicast="tree")
_NCCL = System(
    "nccl",
    f"a broadcast in a chain, after {_GROUP_SETUP_NS // 1_000_000} ms to form its group",
    multicast="chain",
    group_setup_ns=_GROUP_SETUP_NS,
)
_ALL = (
    _LIVESCALE,
    like(
        _LIVESCALE,
        "livescale-recent",
        "livescale, but devices that hold nothing go to one model after the other, and spares that"
        " were used last are kept, whoever needs them",
        warm_spares="recent",
    ),
    _ON_DEMAND,
    like(
        _ON_DEMAND,
        "livescale-no-spares",
        "livescale-on-demand, but released devices keep nothing",
        warm_spares="off",
    ),
    like(
        _LIVESCALE,
        "livescale-slo",
        "livescale, but it aims at a TTFT of 450 ms (livescale-slo:300ms: at another)",
        aim=SloAim(ttft_ns=450_000_000),
    ),
    _BOUNDS,
    like(
        _BOUNDS,
        "livescale-cold",
        "livescale-bounds, but released devices keep nothing",
        warm_spares="off",
    ),
    like(
        _BOUNDS,
        "livescale-resident",
        "livescale-bounds, and workers keep half of the layers of a model that they gave up",
        resident_percent=60,
    ),
    like(
        _BOUNDS,
        "livescale-move",
        "livescale-bounds, and requests of an instance that is given up move to others",
        drain="move",
    ),
    like(
        _BOUNDS,
        "livescale-stop",
        "livescale-bounds, but new instances serve when everything is there",
        live_order="stop-the-world",
    ),
    like(
        _BOUNDS,
        "livescale-overlap",
        "livescale-bounds, but new instances run layers as they arrive and share no work",
        live_order="overlap",
    ),
    like(
        _BOUNDS,
        "livescale-pairs",
        "livescale-bounds, but every overloaded instance gets a partner, whether that pays or not",
        controller={"pairs": ANY_PAIR},
    ),
    _INTERFERING,
    like(
        _INTERFERING,
        "livescale-interfering-equal",
        "livescale-interfering, and rows and KV share links with parameters instead of going first",
        world={"link_sharing": EQUAL},
    ),
    System("livescale-stop-cold", "livescale-stop, and released devices keep nothing"),
    like(
        _BOUNDS,
        "best-effort",
        "livescale-bounds, but a new instance runs what it has of each batch once (BlitzScale"
        " Figure 15)",
        live_order="best-effort",
    ),
    _STOP,
    like(
        _STOP,
        "overlap",
        "stop, but a new instance runs layers as they arrive and shares no work (PipeSwitch)",
        live_order="overlap",
    ),
    like(
        _STOP,
        "zigzag",
        "stop, but overloaded instances finish what new ones began (BlitzScale)",
        live_order="zigzag",
    ),
    System(
        "serverlessllm",
        "host memory keeps what its devices loaded for 5 min (BlitzScale, Figure 4), else storage",
        multicast="host",
        placement=CacheCopies(ttl_ns=300 * NS_PER_S),
    ),
    System(
        "serverlessllm-30s",
        "the same for 30 s, and no instance changes its role, as in the code of BlitzScale's"
        " authors",
        multicast="host",
        placement=CacheCopies(ttl_ns=30 * NS_PER_S),
        controller={"mutations": False},
    ),
    System(
        "allcache",
        "every host keeps every model: devices load from their own host's memory",
        multicast="host",
        placement=AllCopies(),
    ),
    System(
        "lambda-memory",
        "allcache, but each device begins elsewhere in the model, and those that load serve in"
        " teams, one of each copy's (λScale from host memory)",
        multicast="host-k-way",
        placement=AllCopies(),
        teams="pairs",
    ),
    System("fixed-full", "the whole pool serves all the time", fixed_percent=100),
    System("fixed-half", "half of the pool serves all the time", fixed_percent=50),
    System(
        "fixed",
        "N instances of each model serve all the time (fixed:N), or P that prefill and D that"
        " decode (fixed:P+D); fixed:auto: the device time of livescale (fixed:auto=NAME: of that"
        " system)",
        fixed_instances=1,
    ),
    System("unicast", "one copy sends to every new instance over the network", multicast="unicast"),
    System(
        "direct",
        "all copies send to new instances over the network, each to its share (BlitzScale's"
        ' "+Network")',
        multicast="direct",
    ),
    _TREE,
    like(
        _TREE,
        "faasnet",
        "tree, but hosts keep no copies: what no device holds comes from storage (λScale §7.5)",
        placement=NoCopies(),
    ),
    _NCCL,
    like(
        _NCCL,
        "nccl-ssd",
        "nccl, but hosts keep no copies: what no device holds comes from storage (λScale §7.5)",
        placement=NoCopies(),
    ),
    System("binomial", "the binomial pipeline of blocks (λScale)", multicast="binomial"),
    System(
        "lambda",
        "binomial, and instances that load serve in teams of as few as have the model (λScale)",
        multicast="binomial",
        teams="cover",
    ),
    System(
        "lambda-pairs",
        "binomial, and instances that load serve in teams, one of each source's (λScale's"
        " Algorithm 2)",
        multicast="binomial",
        teams="pairs",
    ),
    System(
        "lambda-zigzag",
        "lambda, and overloaded instances finish what new ones began until these are a team",
        multicast="binomial",
        live_order="zigzag",
        teams="cover",
    ),
    System(
        "lambda-auto",
        "livescale-cold, and loads for which teams have the shorter wait by prediction go by the"
        " binomial pipeline, in teams of one of each source's",
        live_order="zigzag",
        teams="pairs",
    ),
    System("storage", "every device reads storage", multicast="storage", placement=NoCopies()),
    like(
        _LIVESCALE,
        "ideal",
        "livescale, but parameters are there at once: what scaling alone could do",
        live_order="stop-the-world",
        load_ns=0,
    ),
    System("ideal-bounds", "livescale-bounds, but parameters are there at once", load_ns=0),
    System("fixed-delay", "each load takes 1 s (fixed-delay:2s: another time)", load_ns=NS_PER_S),
)
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}


def find_system(text: str) -> System:
    """The system of that name; "fixed-delay:2s", "livescale-slo:300ms", "fixed:6", "fixed:5+3" and
    "fixed:auto" carry a parameter. With "+early" behind it an instance gets all requests at once
    that it has room for.

    Raises UnknownSystem.
    """
    if text.endswith(EARLY):
        late = find_system(text.removesuffix(EARLY))
        sentence = f"{late.sentence}, and requests are bound early"
        return like(late, text, sentence, binding=EarlyBinding())
    name, colon, parameter = text.partition(":")
    system = SYSTEMS.get(name)
    if system is None:
        near = difflib.get_close_matches(name, SYSTEMS, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise UnknownSystem(f"there is no strategy '{text}'{hint}: {', '.join(SYSTEMS)}")
    if not colon:
        return system
    if name == "fixed-delay":
        delay_ns = _time_ns(name, parameter)
        return like(system, text, f"each load takes {parameter}", load_ns=delay_ns)
    if name == "livescale-slo":
        aim_ns = _time_ns(name, parameter)
        if not aim_ns:
            raise UnknownSystem(f"'{text}': the aim is longer than no time")
        sentence = f"livescale, but it aims at a TTFT of {parameter}"
        return like(system, text, sentence, aim=SloAim(ttft_ns=aim_ns))
    auto, _, other = parameter.partition("=")
    if name == "fixed" and auto == "auto":
        return _fixed_like(text, find_system(other) if other else SYSTEMS["livescale"])
    if name == "fixed":
        return _fixed(text, system, parameter)
    words = "only fixed-delay:TIME, livescale-slo:TIME and fixed:N have a parameter"
    raise UnknownSystem(f"'{text}': {words}")


# -- helpers, in the order used -------------------------------------------------------------------


def _time_ns(name: str, parameter: str) -> int:
    """Raises UnknownSystem."""
    found = re.fullmatch(TIME, parameter)
    if found is None:
        hint = f"write a time, as in {name}:2s or {name}:250ms"
        raise UnknownSystem(f"'{name}:{parameter}': {hint}")
    return exact_ns(found[1], found[2])


def _fixed(text: str, system: System, parameter: str) -> System:
    """Of "6", or of "5+3". Raises UnknownSystem."""
    if _COUNT.fullmatch(parameter) is not None:
        sentence = f"{parameter} instances of each model serve all the time"
        return like(system, text, sentence, fixed_instances=int(parameter))
    found = _TWO_COUNTS.fullmatch(parameter)
    if found is None:
        hint = "write a number of instances, as in fixed:6 or fixed:5+3, or fixed:auto"
        raise UnknownSystem(f"'{text}': {hint}")
    sentence = f"{found[1]} prefill and {found[2]} decode instances serve all the time"
    counts = (int(found[1]), int(found[2]))
    return like(system, text, sentence, fixed_instances=None, fixed_roles=counts)


def _fixed_like(text: str, other: System) -> System:
    if other.is_fixed:
        raise UnknownSystem(f"'{text}': {other.name} is fixed itself: name a system that scales")
    sentence = f"as many instances, all the time, as take the device time of {other.name}"
    return System(text, sentence, fixed_like=other.name)
