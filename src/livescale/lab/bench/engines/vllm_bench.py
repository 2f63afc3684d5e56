"""`bench vllm`: what LiveScale adds to vLLM, and how soon an engine that is kept has a model.

Each part is a run of its own that gives some of the figures; another one joins by standing in
`PARTS`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from livescale.lab.bench.engines.engines import check_vllm_python, package_version
from livescale.lab.bench.engines.vllm_binding import measure_binding
from livescale.lab.bench.engines.vllm_loads import measure_link_load, measure_loads
from livescale.lab.bench.engines.vllm_options import FLAG, VllmBenchOptions
from livescale.lab.bench.engines.vllm_overlap import measure_gates
from livescale.lab.bench.engines.vllm_serving import measure_serving


class VllmFigures(Protocol):
    """What a part found. `figures` stand at the top of the JSON object, `details` under the part's
    name."""

    def figures(self) -> dict[str, object]: ...

    def details(self) -> object: ...

    def text(self) -> str: ...


Part = Callable[[VllmBenchOptions, Path, Callable[[str], None]], VllmFigures]
"""Takes an empty folder."""
PARTS: Mapping[str, Part] = {
    "serving": measure_serving,
    "loads": measure_loads,
    "link": measure_link_load,
    "binding": measure_binding,
    "overlap": measure_gates,
}


@dataclass(frozen=True, slots=True)
class VllmReport:
    """Of all parts that were asked for."""

    vllm_version: str
    parts: Mapping[str, VllmFigures]

    @property
    def is_right(self) -> bool:
        """No request was lost, and all tokens were those of plain vLLM."""
        figures = self.as_json()
        wrong = ("lost", "token_mismatches", "overlap_token_mismatches")
        return not any(figures.get(name) for name in wrong)

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {"vllm_version": self.vllm_version}
        for part in self.parts.values():
            figures |= part.figures()
        return figures | {name: part.details() for name, part in self.parts.items()}

    def text(self) -> str:
        return "\n\n".join([f"vLLM {self.vllm_version}", *(p.text() for p in self.parts.values())])


def run_vllm(options: VllmBenchOptions, say: Callable[[str], None]) -> VllmReport:
    """One part after the other. Raises BenchError, and PoolFailed where a pool does not start."""
    check_vllm_python(options.vllm_python)
    version = package_version(FLAG, options.vllm_python, "vllm")
    assert version is not None, "it was checked"
    found = {}
    for name in options.parts:
        say(f"{name} …")
        with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
            found[name] = PARTS[name](options, Path(scratch), say)
    return VllmReport(version, found)
