"""The simulation of a burst that was played: the same order and protocol, fed with its times.

Layers arrive when they arrived, a layer takes what it took there in that play, rows and KV cross a
link of the same rate; put to the test is everything else: processes, sockets, threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.engine.files.model_files import model_spec
from livescale.lab.bench.live.live_models import PairSetting
from livescale.lab.bench.live.live_runs import ALONE, OVERLAP, STOP, PairPlay
from livescale.lab.bench.live.live_worker import WorkItem
from livescale.sim.pair.pair_world import PairLoad, PairRun, PairWorld

# Two threads and a socket. The simulated pools have 0.2 ms for the socket alone.
_MESSAGE_NS = 500_000


@dataclass(frozen=True, slots=True)
class TwinPlay:
    """What came of it, from t = 0. `gaps_ns` are between tokens of decodes; `run` is absent where
    there is no pair."""

    ttft_ns: tuple[int, ...]
    first_help_ns: int | None
    gaps_ns: tuple[int, ...]
    run: PairRun | None


def layer_ns(play: PairPlay, batch_tokens: int, work: Sequence[WorkItem] | None = None) -> int:
    """What one layer of a batch took on the average, on both workers or in this `work`. Of a Run
    with decodes beside the prompt, what a Run of decodes takes is left out."""
    items = (*play.source_work, *play.target_work) if work is None else work
    items = [item for item in items if item.requests]
    beside_ns = sum(1 for item in items if item.decodes) * decode_ns(play)
    token_layers = sum(item.layer_count * item.tokens for item in items)
    return (_elapsed_ns(items) - beside_ns) * batch_tokens // token_layers


def decode_ns(play: PairPlay) -> int:
    """What a Run of decodes took on the source on the average; 0 without any."""
    items = [item for item in play.source_work if item.decodes and not item.requests]
    return _elapsed_ns(items) // len(items) if items else 0


def simulate(play: PairPlay, setting: PairSetting) -> TwinPlay:
    """The same burst in virtual time."""
    burst = play.burst
    if burst.order == ALONE and not burst.decodes:
        return TwinPlay(_one_by_one(play, setting, burst.batches), None, (), None)
    # Nothing is shared under overlap: the batches are dealt out as they were in the play.
    kept = play.kept_by_source if burst.order == OVERLAP else 0
    if kept == burst.batches:
        return TwinPlay(_one_by_one(play, setting, kept), None, (), None)
    run = PairWorld(_load(play, setting, burst.batches - kept)).play()
    help_ns = min((work.stop_ns for work in run.works if work.on_target), default=None)
    ttft_ns = (*_one_by_one(play, setting, kept), *run.first_token_ns)
    return TwinPlay(ttft_ns, help_ns, tuple(run.tbt_ns), run)


# -- helpers, in the order used -------------------------------------------------------------------


def _elapsed_ns(items: Sequence[WorkItem]) -> int:
    return sum(item.stop_ns - item.start_ns for item in items)


def _one_by_one(play: PairPlay, setting: PairSetting, batches: int) -> tuple[int, ...]:
    """The source alone, without decodes."""
    batch_ns = setting.decoder_layers * layer_ns(play, setting.batch_tokens)
    return tuple(batch_ns * (number + 1) for number in range(batches))


def _layer_ns_of(work: Sequence[WorkItem], play: PairPlay, setting: PairSetting) -> int:
    """On one worker; one that did nothing would have been as fast as the other."""
    has_prompts = any(item.requests for item in work)
    return layer_ns(play, setting.batch_tokens, work if has_prompts else None)


def _load(play: PairPlay, setting: PairSetting, batches: int) -> PairLoad:
    spec = model_spec(setting.manifest)
    order = play.burst.order
    never = (1 << 62,) * len(setting.manifest.layers)
    return PairLoad(
        order=STOP if order == ALONE else order,
        layers=setting.decoder_layers,
        batch_layer_ns=(_layer_ns_of(play.source_work, play, setting),) * batches,
        target_layer_ns=(_layer_ns_of(play.target_work, play, setting),) * batches,
        arrived_ns=tuple(at_ns - play.zero_ns for at_ns in play.arrived_ns) or never,
        message_ns=_MESSAGE_NS,
        bytes_per_s=setting.link_bytes_per_s,
        row_bytes=spec.row_bytes_per_token,
        kv_layer_bytes=spec.kv_bytes_per_token // setting.decoder_layers,
        tokens=(setting.batch_tokens,) * batches,
        decodes=play.burst.decodes,
        decode_ns=decode_ns(play),
        output_tokens=play.burst.output_tokens,
        run_tokens_max=setting.run_tokens_max,
    )
