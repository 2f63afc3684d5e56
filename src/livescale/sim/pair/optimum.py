"""The best that a live pair could do: how many layers of each batch the target should run.

An oracle for live orders, not a scheduler: it knows all load times beforehand. Batches wait from 0
on, the source takes them first come, first served, and the least mean time to the first token is
sought (BlitzScale §5.2 as a program, with its third constraint corrected: as printed it is off by
one layer). With T_i layers of batch i on the target, w_i the time of one of its layers and R_m the
time when layer m is there:

    F_i = max over m <= T_i of R_m + sum over j <= i of w_j (T_j - m + 1)^+
    E_i = max(E_{i-1}, F_i) + w_i (L - T_i)

For equal w this is exact; for others the target would have to interrupt a layer, so that the true
optimum can be worse (by a layer of a later batch) and never better, among FIFO ones.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Split:
    """Layers of each batch on the target, and when the batches end. `is_proved`: no other split
    has a smaller mean."""

    target_layers: tuple[int, ...]
    finished_ns: tuple[int, ...]
    is_proved: bool = True

    @property
    def mean_ns(self) -> float:
        return sum(self.finished_ns) / len(self.finished_ns)


class SolverMissingError(RuntimeError):
    """The library that solves integer programs is not installed; the message says how to get it."""


def finish_times(
    target_layers: Sequence[int], layers: int, layer_ns: Sequence[int], loaded_ns: Sequence[int]
) -> tuple[int, ...]:
    """The closed form above: when each batch ends with this split."""
    ends: list[int] = []
    end_ns, waits = 0, (0,) * layers
    for count, each_ns in zip(target_layers, layer_ns, strict=True):
        end_ns, waits = _next_end(end_ns, waits, count, each_ns, loaded_ns)
        ends.append(end_ns)
    return tuple(ends)


def best_split(layers: int, layer_ns: Sequence[int], loaded_ns: Sequence[int]) -> Split:
    """By trying every split, except those that cannot become the best any more. For small cases:
    the work grows as layers to the power of batches."""
    count = len(layer_ns)
    best, best_ns = Split((), ()), 1 << 62
    split: list[int] = []
    ends: list[int] = []

    def go(free_ns: int, total_ns: int, waits: tuple[int, ...]) -> None:
        nonlocal best, best_ns
        number = len(split)
        if number == count:
            best, best_ns = Split(tuple(split), tuple(ends)), total_ns
            return
        each_ns = layer_ns[number]
        for on_target in range(layers + 1):
            end_ns, now_waits = _next_end(free_ns, waits, on_target, each_ns, loaded_ns)
            # Those that follow end no earlier.
            if total_ns + end_ns * (count - number) < best_ns:
                split.append(on_target)
                ends.append(end_ns)
                go(end_ns, total_ns + end_ns, now_waits)
                split.pop()
                ends.pop()

    go(0, 0, (0,) * layers)
    return best


def solve_split(
    layers: int,
    layer_ns: Sequence[int],
    loaded_ns: Sequence[int],
    *,
    limit_s: float = 60.0,
) -> Split:
    """By an integer program for HiGHS: seconds for a real model's layers and a dozen batches.

    The best split found within `limit_s`. Raises SolverMissingError, and TimeoutError if none was.
    """
    highspy = _highspy()
    solver = highspy.Highs()
    solver.silent()
    # Nanoseconds would be large beside the tolerances of a solver.
    scale_ns = min(layer_ns)
    quantum_ns = math.gcd(*layer_ns, *loaded_ns)
    options = {
        "time_limit": limit_s,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,
        # All ends are multiples of it: a sum that is smaller by less is none.
        "mip_abs_gap": 0.99 * quantum_ns / scale_ns,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    scaled = [each_ns / scale_ns for each_ns in layer_ns]
    x = _add_program(solver, layers, scaled, [at_ns / scale_ns for at_ns in loaded_ns])
    status = solver.getModelStatus()
    values = solver.getSolution().col_value
    feasible = highspy.SolutionStatus.kSolutionStatusFeasible
    if solver.getInfo().primal_solution_status != feasible:
        raise TimeoutError(f"HiGHS found no split within {limit_s:g} s")
    split = tuple(sum(round(values[column.index]) for column in row) for row in x)
    ends = finish_times(split, layers, layer_ns, loaded_ns)
    return Split(split, ends, status == highspy.HighsModelStatus.kOptimal)


# -- helpers, in the order used -------------------------------------------------------------------


def _next_end(
    free_ns: int, waits: tuple[int, ...], count: int, each_ns: int, loaded_ns: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """E_i and, by m, what the target then has to do from layer m on, of all batches so far, from
    the same of the batch before."""
    waits = tuple(wait + each_ns * max(count - m, 0) for m, wait in enumerate(waits))
    ready_ns = max((loaded_ns[m] + waits[m] for m in range(count)), default=0)
    return max(free_ns, ready_ns) + each_ns * (len(waits) - count), waits


def _highspy() -> Any:
    """HiGHS is wanted for this alone: it is imported when it is used."""
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        raise SolverMissingError(
            "the optimum needs HiGHS: pip install 'livescale[optimum]'"
        ) from error


def _add_program(
    solver: Any, layers: int, layer_time: Sequence[float], loaded: Sequence[float]
) -> list[list[Any]]:
    """Solve: x[i][m] is 1 where layer m of batch i runs on the target, ends[i] is E_i."""
    count = len(layer_time)
    never = layers * sum(layer_time)  # the source alone
    x = [[solver.addBinary() for _ in range(layers)] for _ in range(count)]
    ends = [solver.addVariable(0, never) for _ in range(count)]
    for i, row in enumerate(x):
        on_source = layer_time[i] * layers - layer_time[i] * solver.qsum(row)
        for m in range(layers - 1):
            solver.addConstr(row[m] >= row[m + 1])
        solver.addConstr(ends[i] >= (ends[i - 1] + on_source if i else on_source))
        for m in range(layers):
            if loaded[m] + layer_time[i] > never:
                solver.addConstr(row[m] <= 0)  # comes too late for anything
                continue
            before = solver.qsum(
                layer_time[j] * x[j][k] for j in range(i + 1) for k in range(m, layers)
            )
            # Not needed where x[i][m] is 0: then the right side is below what E_i is anyway.
            slack = loaded[m] + sum(layer_time[: i + 1]) * (layers - m)
            rest = on_source - slack * (1 - row[m])
            solver.addConstr(ends[i] >= loaded[m] + before + rest)
    solver.minimize(solver.qsum(ends))
    return x
