"""Runs to be timed: strategies, and what makes one of them at least as much work as another."""

from __future__ import annotations

from hypothesis import strategies as st

from livescale.latency.work import LatencyModel, RunWork

chunks = st.lists(
    st.tuples(st.integers(1, 8192), st.integers(0, 32_768)), min_size=0, max_size=4
).map(tuple)


@st.composite
def works(draw: st.DrawFn) -> RunWork:
    """Chunks of prompts beside decodes of one length; all decodes sample, chunks may."""
    prefills = draw(chunks)
    decodes = draw(st.integers(0 if prefills else 1, 300))
    context = draw(st.integers(1, 40_000))
    ended = draw(st.integers(0, len(prefills)))
    return RunWork(prefills, decodes, decodes * context, decodes + ended)


def context_of(work: RunWork) -> int:
    return work.decode_context_tokens // work.decodes if work.decodes else 1


def larger(work: RunWork, more_tokens: int, more_context: int, more_decodes: int) -> list[RunWork]:
    """The same work and one thing more of it: longer chunks, more before them, longer contexts,
    more decodes of the same length, one more sequence through the head."""
    context, decodes = context_of(work), work.decodes
    longer = tuple((new + more_tokens, before) for new, before in work.prefills)
    deeper = tuple((new, before + more_context) for new, before in work.prefills)
    more = decodes + more_decodes
    contexts = decodes * (context + more_context)
    return [
        RunWork(longer, decodes, work.decode_context_tokens, work.sampled),
        RunWork(deeper, decodes, work.decode_context_tokens, work.sampled),
        RunWork(work.prefills, decodes, contexts, work.sampled),
        RunWork(work.prefills, more, more * context, work.sampled + more_decodes),
        RunWork(work.prefills, decodes, work.decode_context_tokens, work.sampled + 1),
    ]


def are_steps_of_single_runs(model: LatencyModel, decodes: int, context: int, steps: int) -> bool:
    """Several steps of decodes with so much context each take as long as that many Runs."""
    runs = [
        RunWork((), decodes, decodes * (context + step), sampled=decodes) for step in range(steps)
    ]
    times = model.decode_ns(decodes, decodes * context, steps)
    return times == [model.run_ns(work) for work in runs]
