"""`bench packing`: one block of a model's parameters from one process to another, step by step.

λScale's Figure 17 on the sockets of one machine. Steps take turns, so that what else the machine
does meets all of them; every block is checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import psutil

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.pools.gateway_load import allow_descriptors
from livescale.lab.bench.transfer.packing_wire import LAYERS, STEPS, messages
from livescale.report.run.terminal import table
from livescale.values.units import NS_PER_MS

_WAIT_S = 120.0
# Sender: the block, copies by tensor and in one piece, and what is taken for one block.
# Receiver: places by tensor and in one piece, and what is taken for one block.
_BLOCKS_IN_MEMORY = 7
_OTHER_DESCRIPTORS = 100


@dataclass(frozen=True, slots=True)
class PackingOptions:
    """A block has so many decoder layers of a model of `LAYERS`. Rounds, one block by each step,
    begin for `seconds`; two at least, of which the first does not count."""

    model: str = "llama-2-7b"
    layers: int = 1
    seconds: float = 20.0
    seed: int = 0

    def tensor_bytes(self) -> tuple[int, ...]:
        """Sizes of a block's tensors."""
        return LAYERS[self.model].tensor_bytes() * self.layers


@dataclass(frozen=True, slots=True)
class PackingReport:
    """Times of all blocks that count, by step, in the order of STEPS."""

    options: PackingOptions
    took_ns: Mapping[str, Sequence[int]]
    others_share: float

    @property
    def blocks(self) -> int:
        """That each step moved."""
        return len(self.took_ns[STEPS[0].name])

    def rows(self) -> list[dict[str, object]]:
        """Figures of each step."""
        first = median(self.took_ns[STEPS[0].name])
        return [
            {
                "step": step.name,
                "messages": len(messages(self.options.tensor_bytes(), step.is_packed)),
                "block_ms_p50": median(self.took_ns[step.name]) / NS_PER_MS,
                "block_ms_max": max(self.took_ns[step.name]) / NS_PER_MS,
                "ratio_to_first": median(self.took_ns[step.name]) / first,
            }
            for step in STEPS
        ]

    @property
    def falls_with_each_step(self) -> bool:
        """The median of each step is less than that of the one before."""
        medians = [median(self.took_ns[step.name]) for step in STEPS]
        return all(after < before for before, after in pairwise(medians))

    def text(self) -> str:
        size = sum(self.options.tensor_bytes()) / 1e6
        header = ["step", "messages", "p50 ms", "max ms", "of the first", "what it adds"]
        lines = [[*row.values(), step.adds] for row, step in zip(self.rows(), STEPS, strict=True)]
        falls = "falls with each step" if self.falls_with_each_step else "does not always fall"
        return (
            f"{table(header, lines)}\n"
            f"{self.blocks} blocks of {size:.1f} MB by each step; the time {falls}; "
            f"other programs took {self.others_share:.0%} of the CPU time"
        )

    def as_json(self) -> dict[str, object]:
        tensor_bytes = self.options.tensor_bytes()
        return {
            "model": self.options.model,
            "layers": self.options.layers,
            "block_bytes": sum(tensor_bytes),
            "tensors": len(tensor_bytes),
            "blocks": self.blocks,
            "steps": self.rows(),
            "falls_with_each_step": self.falls_with_each_step,
            "others_share": self.others_share,
        }


def run_packing(options: PackingOptions, say: Callable[[str], None]) -> PackingReport:
    """Start both processes and move blocks in turns. Raises BenchError, also for wrong bytes."""
    tensor_bytes = options.tensor_bytes()
    _check_memory(sum(tensor_bytes))
    allow_descriptors(2 * len(tensor_bytes) + _OTHER_DESCRIPTORS)
    took_ns: dict[str, list[int]] = {step.name: [] for step in STEPS}
    with ExitStack() as stack:
        sender = stack.enter_context(bench_process("the sender", "transfer.packing_sender"))
        # Ended first: the sender's channel ends with it.
        receiver = stack.enter_context(bench_process("the receiver", "transfer.packing_receiver"))
        job: dict[str, object] = {"tensor_bytes": tensor_bytes, "seed": options.seed}
        told = sender.ask(job, _WAIT_S)["settings"]
        receiver.ask({**job, **told}, _WAIT_S)
        say(f"blocks of {sum(tensor_bytes) / 1e6:.1f} MB, {len(tensor_bytes)} tensors")
        shares = CpuShares([os.getpid()])
        deadline_s = time.monotonic() + options.seconds
        round_number = 0
        while round_number < 2 or time.monotonic() < deadline_s:
            for place in range(len(STEPS)):
                # None of them is always the first.
                number = (place + round_number) % len(STEPS)
                took = _pulled(receiver, number, round_number * len(STEPS) + place)
                if round_number:
                    took_ns[STEPS[number].name].append(took)
            round_number += 1
        others = shares.others()
    return PackingReport(options, took_ns, others)


# -- helpers, in the order used -------------------------------------------------------------------


def _check_memory(block_bytes: int) -> None:
    """Raises BenchError where the machine has too little."""
    needed = _BLOCKS_IN_MEMORY * block_bytes
    available = psutil.virtual_memory().available
    if needed > available:
        raise BenchError(
            f"blocks of {block_bytes} bytes need {needed} bytes of memory, "
            f"the machine has {available} to spare"
        )


def _pulled(receiver: LineProcess, step: int, block: int) -> int:
    """What a block took, in ns."""
    answer = receiver.ask({"step": step, "block": block}, _WAIT_S)
    if not answer["is_right"]:
        raise BenchError(f"{STEPS[step].name}: the bytes of a block came wrong")
    took_ns: int = answer["took_ns"]
    return took_ns
