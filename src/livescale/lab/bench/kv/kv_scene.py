"""What `bench kv` plays, as values: a model, its prompts, the links, and when what is asked for.

The same scene is played in virtual time and by processes on emulated links. Times are counted in
loads, so that a scene of another size has the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from livescale.engine.files.make import Preset
from livescale.lab.testbed.spec import goodput_bytes_per_s
from livescale.load.traces import TraceRow
from livescale.values.types import ModelSpec
from livescale.values.units import NS_PER_S, NS_PER_US

MODEL = "kv"
SHAPE = Preset(8, 512, 896, 8, 8, 512)
"""79 MB, and 32 KiB of KV per token: a short prompt's KV takes a link longer than any message."""
WORKERS = 3
"""A prefill and a decode instance, and a free worker."""
RUN_US, TOKEN_US = 10_000, 500
"""What a timed worker takes for a Run, and for each of its tokens unless a scene has another."""
RUN_TOKENS_MAX = 128
_RATE_PERCENT = 95
_PAUSE_NS = 2 * NS_PER_S
# Of a prompt in the scene of second tokens, over what its KV takes.
_PROMPT_PERMILLE = 1500
_SECOND_PROMPTS = 60
_SECOND_OUTPUT_TOKENS = 40


@dataclass(frozen=True, slots=True)
class RolesWanted:
    """So many instances of each role from `at_ns` on, no more and no less."""

    at_ns: int
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class KvScene:
    """`link_bits_per_s` is the line rate of every link; data planes keep to 95 % of what it carries
    for them. Prompts follow one another so that their KV takes `kv_permille` of that. Timed workers
    take `token_us` for each token of a Run."""

    spec: ModelSpec
    link_bits_per_s: int = 200_000_000
    prompt_tokens: int = 64
    output_tokens: int = 20
    kv_permille: int = 333
    token_us: int = TOKEN_US

    @property
    def bytes_per_s(self) -> int:
        """What a worker sends and receives at most."""
        return goodput_bytes_per_s(self.link_bits_per_s) * _RATE_PERCENT // 100

    @property
    def load_ns(self) -> int:
        """The model's parameters on a link that carries nothing else."""
        return self.spec.size_bytes * NS_PER_S // self.bytes_per_s

    @property
    def kv_ns(self) -> int:
        """The KV of a prompt on a link that carries nothing else."""
        return self.prompt_tokens * self.spec.kv_bytes_per_token * NS_PER_S // self.bytes_per_s

    @property
    def layer_kv_ns(self) -> int:
        """The KV of one of its layers."""
        return self.kv_ns // (self.spec.layers - 2)

    @property
    def run_ns(self) -> int:
        """A Run with one prompt."""
        return (RUN_US + self.token_us * self.prompt_tokens) * NS_PER_US

    @property
    def every_ns(self) -> int:
        """Between two prompts."""
        return self.kv_ns * 1000 // self.kv_permille

    @property
    def wanted(self) -> tuple[RolesWanted, ...]:
        """A load beside nothing, which is taken back; one beside KV; and the new prefill instance
        is to decode: a mutation."""
        alone_ns = _PAUSE_NS // 2
        back_ns = alone_ns + self.load_ns * 3 // 2 + _PAUSE_NS
        beside_ns = self.kv_from_ns + self.load_ns
        mutated_ns = beside_ns + self.load_ns * 5 // 2 + _PAUSE_NS
        return (
            RolesWanted(alone_ns, 2, 1),
            RolesWanted(back_ns, 1, 1),
            RolesWanted(beside_ns, 2, 1),
            RolesWanted(mutated_ns, 1, 2),
        )

    @property
    def kv_from_ns(self) -> int:
        """When the first prompt comes."""
        return self.load_ns * 3 // 2 + 3 * _PAUSE_NS

    @property
    def ends_ns(self) -> int:
        """When no further prompt comes."""
        return self.wanted[-1].at_ns + 2 * _PAUSE_NS

    def rows(self) -> list[TraceRow]:
        """The prompts, all alike."""
        times = range(self.kv_from_ns, self.ends_ns, self.every_ns)
        return [TraceRow(at_ns, self.prompt_tokens, self.output_tokens) for at_ns in times]


class SecondTokenScene(KvScene):
    """Prompts whose layers compute longer than their KV travels, and nothing else: no instance
    comes or changes. Answers last until the next ones begin, so that the decode instance has a Run
    in flight when most of them come."""

    __slots__ = ()

    @classmethod
    def beside(cls, scene: KvScene) -> Self:
        """On the same links, with the same model and prompts. The decode instance gets a third of
        what its link carries."""
        run_us = scene.kv_ns * _PROMPT_PERMILLE // (1000 * NS_PER_US)
        return cls(
            scene.spec,
            scene.link_bits_per_s,
            scene.prompt_tokens,
            _SECOND_OUTPUT_TOKENS,
            token_us=max(run_us - RUN_US, 0) // scene.prompt_tokens + 1,
        )

    @property
    def wanted(self) -> tuple[RolesWanted, ...]:
        return ()

    @property
    def kv_from_ns(self) -> int:
        """When both instances serve, in virtual time, too."""
        return self.load_ns * 3 // 2

    @property
    def ends_ns(self) -> int:
        return self.kv_from_ns + _SECOND_PROMPTS * self.every_ns
