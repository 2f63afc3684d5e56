"""ParameterPool: the last copy cannot be dropped, nor one that is read from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.pool import LastCopyError, ParameterPool
from livescale.types import WorkerRef

workers = st.integers(0, 3).map(WorkerRef)
models = st.sampled_from(["a", "b"])
calls = st.one_of(
    st.tuples(st.just("add"), models, workers),
    st.tuples(st.just("drop"), models, workers),
    st.tuples(st.just("begin"), models, workers),
    st.tuples(st.just("end"), models, workers),
)


@given(st.lists(calls, max_size=60))
def test_whatever_is_asked_a_last_or_read_copy_stays(
    asked: list[tuple[str, str, WorkerRef]],
) -> None:
    pool = ParameterPool()
    had_copy: set[str] = set()
    reads: set[tuple[str, WorkerRef]] = set()
    for call, model, worker in asked:
        before = pool.holders(model)
        if call == "add":
            pool.add(model, worker)
            had_copy.add(model)
        elif call == "begin":
            pool.begin_read(f"reader of {model}", worker)
            reads.add((model, worker))
        elif call == "end":
            pool.end_read(f"reader of {model}", worker)
            reads.discard((model, worker))
        else:
            is_read = any(source == worker for _, source in reads)
            allowed = worker in before and len(before) > 1 and not is_read
            assert pool.can_drop(model, worker) is allowed
            if allowed:
                pool.drop(model, worker)
                assert pool.holders(model) == [w for w in before if w != worker]
            else:
                with pytest.raises(LastCopyError, match=f"keeps {model}"):
                    pool.drop(model, worker)
                assert pool.holders(model) == before
        for kept in had_copy:
            assert pool.holders(kept), f"the last copy of {kept} is gone"


def test_losing_a_worker_takes_its_copies_and_reads() -> None:
    pool = ParameterPool()
    pool.add("a", WorkerRef(1))
    pool.add("a", WorkerRef(0))
    pool.begin_read("x", WorkerRef(0))
    assert pool.holders("a") == [WorkerRef(0), WorkerRef(1)]
    assert pool.readers(WorkerRef(0)) == 1
    pool.lose(WorkerRef(0))
    assert pool.holders("a") == [WorkerRef(1)]
    assert pool.readers(WorkerRef(0)) == 0
    assert repr(pool) == "<ParameterPool a: 1, 0 reads>"
