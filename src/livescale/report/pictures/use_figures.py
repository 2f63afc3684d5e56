"""What devices did over time, as stacked areas: of the pool, and of each of its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from livescale.report.pictures import figures, keys, series
from livescale.report.run.reported_run import ReportedRun
from livescale.telemetry.history.device_time import DeviceUse
from livescale.values.units import NS_PER_S

MODELS_MAX = 12
"""Models with an area of their own: those that held devices longest."""

_ByUse = Mapping[DeviceUse, Sequence[series.Steps]]


def use_groups(
    runs: Sequence[ReportedRun], name: Callable[[], str], notes: list[str]
) -> list[keys.PanelGroup]:
    """The pool of each run, then its models if there are several. `name` begins the ids of the next
    figure; `notes` grow with models that are left out."""
    uses = [series.use_steps(run) for run in runs]
    of_pools = [_together(of) for of in uses]
    until_s = max(*(run.end_ns / NS_PER_S for run in runs), 0.01)
    pools, models = [], []
    for run, of, of_pool in zip(runs, uses, of_pools, strict=True):
        title = run.name if len(runs) > 1 else ""
        if of_pool:
            edges, layers, devices = _layers(of_pool, until_s)
            svg = figures.pool_uses(name(), layers, edges, devices)
            pools.append(keys.Panel(svg, title))
        names = [model for model in keys.model_colours([run]) if model in of]
        if len(names) > MODELS_MAX:
            notes.append(
                f"{run.name}: devices of {MODELS_MAX} of {len(names)} models are drawn, of those"
                " that held them longest."
            )
        for model in names[:MODELS_MAX] if len(names) > 1 else []:
            edges, layers, most = _layers(_together({model: of[model]}), until_s)
            svg = figures.model_uses(name(), layers, edges, most)
            models.append(keys.Panel(svg, model, title))
    if not pools:
        return []
    legend = keys.use_keys({use for of_pool in of_pools for use in of_pool})
    groups = [keys.PanelGroup(_OF_POOL, legend, pools)]
    if models:
        groups.append(keys.PanelGroup(_OF_MODELS, [], models, columns=2))
    return groups


# -- helpers --------------------------------------------------------------------------------------

_OF_POOL = (
    "All devices of the pool by what they do. Live work of a loading instance counts as loading."
    " Serving, loading and draining together are the GPU time. Spare devices hold parameters of no"
    " instance, and another model can take them."
)
_OF_MODELS = (
    "The same for each model. A device that holds parameters of several models counts for one of"
    " them. Scales differ between models."
)


def _together(
    of: Mapping[str, Mapping[DeviceUse, series.Steps]],
) -> dict[DeviceUse, list[series.Steps]]:
    """The steps of all models by use."""
    found: dict[DeviceUse, list[series.Steps]] = {}
    for of_model in of.values():
        for use, steps in of_model.items():
            found.setdefault(use, []).append(steps)
    return found


def _layers(
    by_use: _ByUse, until_s: float
) -> tuple[series.Floats, list[tuple[str, series.Floats]], float]:
    """Edges, a colour and counts between them for each use, and the most devices at a time."""
    every = [steps for of_use in by_use.values() for steps in of_use]
    edges, total = series.stacked(every, until_s)
    layers = [
        (colour, np.sum([series.sampled(s, edges[:-1]) for s in by_use[use]], axis=0))
        for use, colour in keys.USE_COLOURS.items()
        if use in by_use
    ]
    return edges, layers, float(total.max())
