"""What a peer's message may bring: sizes that follow from what was agreed before, and nothing else.

A message of another member is not to be believed. What is checked here does not depend on how it
came.
"""

from __future__ import annotations

from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.live_messages import Handover, Offer
from livescale.batching.run import SequenceSpec


class UnexpectedMessage(ValueError):
    """A peer's message cannot be: the text says why."""


def check_offer(message: Offer) -> None:
    """Raises UnexpectedMessage for sizes that no requests have."""
    known, most = message.tokens, message.tokens_max
    if len(known) != len(most) or not all(0 < k <= m for k, m in zip(known, most, strict=True)):
        raise UnexpectedMessage(f"an offer of {known} tokens, at most {most}")


def check_handover(live: LiveBatcher, message: Handover, pulled: tuple[int, ...]) -> None:
    """The batch is the one that was offered (some may have been cancelled), and can run here.
    `pulled` are the known tokens of the requests that were offered. Raises UnexpectedMessage."""
    layers, offered = live.batcher.span.stop - 2, sorted(pulled)
    done = [live.batcher.span.stop] if message.decoding else [0, *range(2, layers + 1)]
    if message.next_layer not in done:
        raise UnexpectedMessage(f"a batch that is at layer {message.next_layer} of {layers}")
    if not 0 <= message.following_done <= layers:
        raise UnexpectedMessage(f"a next batch with {message.following_done} layers of {layers}")
    if len({spec.request for spec in message.requests}) < len(message.requests):
        raise UnexpectedMessage("a request is in the batch twice")
    for spec in sorted(message.requests, key=_known_tokens):
        known = _known_tokens(spec)
        fitting = [n for n in offered if n == known or (message.decoding and n > known)]
        if not fitting:
            raise UnexpectedMessage(f"{spec.request} has {known} tokens: not offered")
        offered.remove(fitting[0])
        if message.decoding and not spec.generated_ids:
            raise UnexpectedMessage(f"{spec.request} does not decode")
        if not spec.prompt_ids:
            raise UnexpectedMessage(f"{spec.request} has no prompt")
        most = len(spec.prompt_ids) + spec.sampling.output_tokens_max - 1
        if not known <= most <= live.batcher.tokens_held_max():
            raise UnexpectedMessage(f"{spec.request} needs KV for {most} tokens")
        if spec.attempt in live.batcher.attempts(spec.request):
            raise UnexpectedMessage(f"attempt {spec.attempt} at {spec.request} is here already")


def _known_tokens(spec: SequenceSpec) -> int:
    return len(spec.prompt_ids) + len(spec.generated_ids)
