"""ParameterPool: the last copy cannot be dropped, nor one that is read from."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.pool import LastCopyError, ParameterPool
from livescale.types import WorkerRef, agent_ref

MODELS = ["a", "b"]
#: a holder is a worker, a pair of workers (the ranks of one instance) or a host agent
HOLDERS = [
    (WorkerRef(0),),
    (WorkerRef(1),),
    (WorkerRef(2), WorkerRef(3)),
    (agent_ref(0),),
    (agent_ref(1), agent_ref(1)),
]
verbs = ["begin", "complete", "drop", "read", "stop", "forget", "lose", "retire"]
calls = st.tuples(
    st.sampled_from(verbs),
    st.sampled_from(MODELS),
    st.sampled_from(HOLDERS),
    st.integers(0, 1),
)


class PoolOracle:
    """What a pool must answer, with plain sets of (model, holder)."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[str, WorkerRef], dict[int, None]] = {}
        self.sizes: dict[tuple[str, WorkerRef], tuple[WorkerRef, ...]] = {}
        self.reads: set[tuple[str, WorkerRef]] = set()
        self.retired: set[str] = set()

    def is_whole(self, key: tuple[str, WorkerRef]) -> bool:
        return key in self.ranks and len(self.ranks[key]) == len(self.sizes[key])

    def whole(self, model: str) -> list[WorkerRef]:
        return sorted(key[1] for key in self.ranks if key[0] == model and self.is_whole(key))

    def may_drop(self, model: str, workers: tuple[WorkerRef, ...], keeps_last: bool) -> bool:
        key = (model, workers[0])
        if key not in self.ranks or any((model, worker) in self.reads for worker in workers):
            return False
        is_needed = keeps_last and model not in self.retired and self.is_whole(key)
        return not is_needed or len(self.whole(model)) > 1


@given(st.lists(calls, max_size=80), st.booleans())
def test_whatever_is_asked_a_last_or_read_copy_stays(
    asked: Iterable[tuple[str, str, tuple[WorkerRef, ...], int]], keeps_last: bool
) -> None:
    pool, oracle = ParameterPool(keeps_last), PoolOracle()
    for call, model, workers, rank in asked:
        holder = workers[0]
        key = (model, holder)
        before = oracle.whole(model)
        if call == "begin" and key not in oracle.ranks:
            pool.begin(model, workers, 30)
            oracle.ranks[key], oracle.sizes[key] = {}, workers
        elif call == "complete" and rank < len(workers):
            pool.complete(model, holder, rank)
            if key in oracle.ranks:
                oracle.ranks[key][rank] = None
        elif call == "drop":
            allowed = oracle.may_drop(model, workers, keeps_last)
            assert pool.can_drop(model, holder) is allowed
            if allowed:
                pool.drop(model, holder)
                del oracle.ranks[key]
            else:
                with pytest.raises(LastCopyError, match=f"keeps {model}"):
                    pool.drop(model, holder)
            if keeps_last and before and model not in oracle.retired:
                assert oracle.whole(model), "by dropping the last copy never goes"
        elif call == "read":
            pool.begin_read("reader", model, workers[-1])
            oracle.reads.add((model, workers[-1]))
        elif call == "stop":
            pool.end_read("reader", model, workers[-1])
            oracle.reads.discard((model, workers[-1]))
        elif call == "forget" and not oracle.is_whole(key):
            pool.forget(model, holder)
            oracle.ranks.pop(key, None)
        elif call == "lose":
            pool.lose(workers[-1])
            for lost in [k for k in oracle.ranks if workers[-1] in oracle.sizes[k]]:
                del oracle.ranks[lost]
            oracle.reads = {read for read in oracle.reads if read[1] != workers[-1]}
        elif call == "retire":
            pool.retire(model)
            oracle.retired.add(model)
        check(pool, oracle)


def check(pool: ParameterPool, oracle: PoolOracle) -> None:
    for model in MODELS:
        there = sorted(key[1] for key in oracle.ranks if key[0] == model)
        assert [copy.holder for copy in pool.copies(model)] == there
        whole = oracle.whole(model)
        assert pool.holders(model) == [holder for holder in whole if not holder.is_agent]
        assert [c.holder for c in pool.host_copies(model)] == [h for h in there if h.is_agent]
    for agent in (agent_ref(0), agent_ref(1)):
        held = [key for key in oracle.ranks if key[1] == agent]
        copies = [copy for model in MODELS for copy in pool.host_copies(model)]
        size = sum(copy.size_bytes for copy in copies if copy.holder == agent)
        assert size == 30 * len(held)
    for workers in HOLDERS:
        readers = sum(read[1] == workers[-1] for read in oracle.reads)
        assert pool.readers(workers[-1]) == readers


def test_a_complete_copy_is_never_forgotten_by_accident() -> None:
    pool = ParameterPool()
    pool.begin("a", (WorkerRef(0),), 30)
    pool.complete("a", WorkerRef(0), 0)
    with pytest.raises(AssertionError, match="is forgotten"):
        pool.forget("a", WorkerRef(0))


def test_a_model_is_forgotten_only_when_nothing_of_it_is_left() -> None:
    pool = ParameterPool()
    pool.begin("a", (agent_ref(0),), 30)
    pool.retire("a")
    with pytest.raises(AssertionError, match="are left"):
        pool.forget_model("a")
    pool.drop("a", agent_ref(0))
    pool.forget_model("a")
    assert repr(pool) == "<ParameterPool empty, 0 reads>"
