"""A Run of which an executor cannot compute all requests: the pieces that it can, together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from livescale.batching.runs.faulty_runs import FaultyRequest, RunFailed, find_faulty
from livescale.batching.runs.run import Run
from livescale.engine.base.errors import spoils_device
from livescale.engine.base.run_result import InstanceExecutor, RowSum, RunResult
from livescale.values.types import LayerSpan, RequestId, TokenLogprobs

if TYPE_CHECKING:
    from livescale.engine.base.run_result import HiddenRows


def run_or_pieces(
    executor: InstanceExecutor,
    run: Run,
    rows: HiddenRows | None,
    layer_ran: Callable[[int], None] | None,
    row_bytes: int,
) -> tuple[RunResult, tuple[FaultyRequest, ...]]:
    """What came of the Run, and of which requests nothing did: their tokens are 0, their rows have
    no meaning. `row_bytes` is the size of a row that it gives (0: it gives none). Raises what the
    executor raises of its device, and all that an engine raises which schedules by itself."""

    def told(layer: int) -> None:
        try:
            assert layer_ran is not None
            layer_ran(layer)
        except Exception as error:
            # It is no request's fault what the member does between two layers.
            raise AssertionError(f"behind layer {layer} of a Run: {error}") from error

    try:
        return executor.run(run, rows, told if layer_ran is not None else None), ()
    except Exception as error:
        if executor.is_engine or spoils_device(error):
            raise
        failure = RunFailed(words_of(error))
    counts = [segment.token_count for segment in run.segments]
    own = [] if rows is None else executor.split_rows(rows, counts)
    places = {id(segment): place for place, segment in enumerate(run.segments)}

    def execute(piece: Run) -> RunResult:
        first = places[id(piece.segments[0])]
        its = own[first : first + len(piece.segments)]
        try:
            return executor.run(piece, executor.join_rows(its) if its else None)
        except Exception as error:
            if spoils_device(error):
                raise
            raise RunFailed(words_of(error)) from error

    pieces, faulty = find_faulty(run, failure, execute)
    return _together(executor, run, pieces, row_bytes), tuple(faulty)


def nothing_of(
    executor: InstanceExecutor, run: Run, row_bytes: int, reason: str
) -> tuple[RunResult, tuple[FaultyRequest, ...]]:
    """As above, where the model is at fault: all requests of the Run are to run elsewhere."""
    faulty = tuple(
        FaultyRequest(segment.request, segment.attempt, reason, runs_elsewhere=True)
        for segment in run.segments
    )
    return _together(executor, run, [], row_bytes), faulty


def why_broken(executor: InstanceExecutor, span: LayerSpan, decoder_layers: range) -> str | None:
    """Compute one harmless token over the layers: why that fails (None: it does not). KV that lies
    in its place is kept. Raises what the executor raises of its device."""
    kept = {layer: executor.export_kv(layer, (0,), 1) for layer in decoder_layers}
    try:
        executor.prefill_tokens_per_s(span, 1)
    except Exception as error:
        if spoils_device(error):
            raise
        return words_of(error)
    finally:
        for layer, content in kept.items():
            executor.import_kv(layer, (0,), 1, memoryview(bytearray(content)))
    return None


def words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# -- helpers, in the order used -------------------------------------------------------------------


def _together(
    executor: InstanceExecutor, run: Run, pieces: list[tuple[Run, RunResult]], row_bytes: int
) -> RunResult:
    tokens: dict[int, int] = {}
    hidden: dict[int, HiddenRows] = {}
    logprobs: dict[RequestId, TokenLogprobs] = {}
    row_sums: dict[RequestId, RowSum] = {}
    for piece, result in pieces:
        if result.hidden is None:
            sampling = [id(segment) for segment in piece.segments if segment.samples]
            tokens |= zip(sampling, result.token_ids, strict=True)
        else:
            counts = [segment.token_count for segment in piece.segments]
            split = executor.split_rows(result.hidden, counts)
            hidden |= {id(s): its for s, its in zip(piece.segments, split, strict=True)}
        logprobs |= result.logprobs
        row_sums |= result.row_sums
    if not row_bytes:
        given = [tokens.get(id(segment), 0) for segment in run.segments if segment.samples]
        return RunResult(None, given, logprobs, row_sums)
    for segment in run.segments:
        if id(segment) not in hidden:
            blank = memoryview(bytearray(segment.token_count * row_bytes))
            hidden[id(segment)] = executor.import_rows(blank, segment.token_count)
    return RunResult(executor.join_rows([hidden[id(s)] for s in run.segments]), [])
