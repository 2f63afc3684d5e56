"""The figures of a page in their order, each with its sentence and its key; and what is missing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from livescale.report.pictures import figures, keys, lanes, series
from livescale.report.pictures.canvas import ACCENT, COLOURS, LOAD
from livescale.report.pictures.live_figures import live_groups
from livescale.report.pictures.use_figures import use_groups
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.terminal import seconds
from livescale.values.units import NS_PER_S

_BINS_MAX = 240
_WIDE_BINS_MAX = 80
_NARROW_LANES_MAX = 16
"""Up to so many loads are shown close up in half the width of the page."""
_KIND_WORDS = {
    "nic": "NIC",
    "spine": "leaf to spine",
    "group": "scale-up group",
    "host": "host memory to device",
    "storage": "local storage",
    "remote_storage": "remote storage",
}


class Gallery:
    """Makes the sections for these runs, all in the same scales.

    `notes` grow with what the records lack.
    """

    def __init__(self, runs: Sequence[ReportedRun]) -> None:
        self.runs = runs
        self.notes: list[str] = []
        self._numbers = itertools.count()
        self._colours = keys.model_colours(runs)
        self._part_colours = keys.part_colours(runs)
        self._requests = [series.request_series(run) for run in runs]
        self._until_s = max(*(run.end_ns / NS_PER_S for run in runs), 0.01)
        self._edges = series.bin_edges(self._until_s, _BINS_MAX)
        self._wide_edges = series.bin_edges(self._until_s, _WIDE_BINS_MAX)

    def sections(self) -> list[keys.Section]:
        """All sections that the records have something for."""
        found = [
            keys.Section("In short", "short", self._short()),
            keys.Section("Load and capacity", "load", [*self._arrivals(), *self._capacity()]),
            keys.Section("Devices", "devices", use_groups(self.runs, self._name, self.notes)),
            keys.Section("Instances", "instances", [*self._lanes(), *self._close_up()]),
            keys.Section("Live scaling", "live", live_groups(self.runs, self._name, self.notes)),
            keys.Section("Latency", "latency", [*self._latencies(), *self._distributions()]),
            keys.Section("Goodput", "goodput", self._goodput()),
            keys.Section("Network", "network", self._network()),
            keys.Section("Host memory", "host-memory", self._copies()),
        ]
        return [section for section in found if section.groups]

    # -- the first screen ---------------------------------------------------------------------

    def _short(self) -> list[keys.PanelGroup]:
        """How fast, how many devices, what went wrong."""
        ttfts = [of.good_ttft_s for of in self._requests]
        panels = []
        if any(len(of) for of in ttfts):
            slos = [_slo_s(run, "TTFT") for run in self.runs]
            of_runs = [series.cumulative(of) for of in ttfts]
            span = figures.span_of(ttfts, slos)
            svg = figures.first_tokens(self._name(), "TTFT", "requests", of_runs, slos, span)
            panels.append(keys.Panel(svg, "How fast: time to the first token"))
        devices = [series.device_steps(run) for run in self.runs]
        svg = figures.devices(self._name(), devices, self._until_s)
        panels.append(keys.Panel(svg, "How many devices instances hold"))
        if any(len(of.due_s) for of in self._requests):
            bad = [
                of.due_s[~(of.is_ok if run.slo is None else of.is_met)]
                for run, of in zip(self.runs, self._requests, strict=True)
            ]
            svg = figures.missed(self._name(), bad, self._until_s)
            panels.append(keys.Panel(svg, "What went wrong: requests so far"))
        sentence = (
            "The area below the devices is the GPU time, loading included, without spare devices"
            " (see Devices). What went wrong are requests that failed, or missed the SLO where one"
            " is known."
        )
        legend = [*keys.run_keys(self.runs), *keys.slo_keys(self.runs)]
        return [keys.PanelGroup(sentence, legend, panels, columns=3)]

    # -- load ---------------------------------------------------------------------------------

    def _arrivals(self) -> list[keys.PanelGroup]:
        if not any(len(of.due_s) for of in self._requests):
            self.notes.append("No record has requests: there are no figures of load and latency.")
            return []
        panels: list[keys.Panel] = []
        shown: list[series.Floats] = []
        of_runs = [series.rates(of.due_s, self._edges) for of in self._requests]
        largest = max(float(per_s.max()) for per_s in of_runs)
        for run, of, per_s in zip(self.runs, self._requests, of_runs, strict=True):
            if any(np.array_equal(of.due_s, other) for other in shown):
                continue
            shown.append(of.due_s)
            svg = figures.arrivals(self._name(), per_s, self._edges, largest)
            panels.append(keys.Panel(svg, run.trace, f"{len(of.due_s):,} requests"))
        many = (
            "" if len(shown) > 1 or len(self.runs) == 1 else "; all runs were given the same load"
        )
        sentence = f"Requests per second as they arrived{self._binned(self._edges)}{many}."
        return [keys.PanelGroup(sentence, [], panels)]

    def _capacity(self) -> list[keys.PanelGroup]:
        if not any(len(of.due_s) for of in self._requests):
            return []
        loads = [series.rates(of.due_s, self._edges, of.prompt_tokens) for of in self._requests]
        capacities = [series.capacity_steps(run) for run in self.runs]
        known = [value for steps in capacities for _, value in steps or ()]
        largest = max([*known, *(float(load.max()) for load in loads)])
        panels = []
        for run, load, steps in zip(self.runs, loads, capacities, strict=True):
            if steps is None:
                self._lacks(run, "the prefill capacity of some model, so no capacity is drawn")
            name = self._name()
            svg = figures.load_and_capacity(name, load, self._edges, steps, largest)
            panels.append(keys.Panel(svg, self._title(run)))
        sentence = (
            "Prompt tokens that arrived per second against what the serving instances can compute:"
            " where the load is above the line, requests wait."
        )
        legend = [
            keys.KeyItem("prompt tokens arriving", LOAD, "area"),
            keys.KeyItem("capacity of serving instances", ACCENT),
        ]
        return [keys.PanelGroup(sentence, legend, panels)]

    # -- instances ----------------------------------------------------------------------------

    def _lanes(self) -> list[keys.PanelGroup]:
        panels = []
        for run in self.runs:
            history = run.history
            if not history.workers:
                self._lacks(run, "any worker, so no lanes are drawn")
                continue
            started_ns = run.started_ns
            svg = lanes.lanes(self._name(), history, started_ns, self._until_s, self._part_colours)
            if len(history.workers) > lanes.LANES_MAX:
                self.notes.append(
                    f"{run.name}: lanes of the first {lanes.LANES_MAX} of {len(history.workers)}"
                    " workers are drawn."
                )
            panels.append(keys.Panel(svg, self._title(run)))
        sentence = (
            "One lane per worker: an instance loads (it fills as its layers arrive), serves, and"
            " drains. An empty lane is a spare worker."
        )
        has_live = any(run.live_stories for run in self.runs)
        if has_live:
            sentence += " A live one takes requests while it loads, and runs the layers it has."
        legend = keys.lane_keys(self._part_colours, has_live=has_live)
        return [keys.PanelGroup(sentence, legend, panels)] if panels else []

    def _close_up(self) -> list[keys.PanelGroup]:
        panels = []
        events = [run.largest_scale_up for run in self.runs]
        in_twos = all(len(event.loads) <= _NARROW_LANES_MAX for event in events if event)
        for run, event in zip(self.runs, events, strict=True):
            known = run.history.by_number
            loads = [load for load in event.loads if load.instance in known] if event else []
            ends_ns = [load.loaded_ns for load in loads if load.loaded_ns is not None]
            if event is None or not ends_ns:
                continue
            spent_ns = max(ends_ns) - event.decided_ns
            until_ns = event.decided_ns + max(spent_ns * 115 // 100, 1_000_000)
            svg = lanes.close_up(
                self._name(),
                run.history,
                [(load.instance, load.worker.worker) for load in loads],
                (event.decided_ns, until_ns),
                self._part_colours,
                is_wide=not in_twos,
            )
            how = f" by {event.strategy}" if event.strategy else ""
            at = seconds((event.decided_ns - run.started_ns) / NS_PER_S)
            took = seconds(spent_ns / NS_PER_S)
            detail = f"{len(loads)} loaded{how}, decided at {at}, done after {took}"
            panels.append(keys.Panel(svg, self._title(run), detail))
        sentence = (
            "The largest scale-up from close by: how much of the model each new instance has, from"
            " the decision on. Scales differ between runs."
        )
        columns = 2 if in_twos else 1
        return [keys.PanelGroup(sentence, [], panels, columns)] if panels else []

    # -- latency ------------------------------------------------------------------------------

    def _latencies(self) -> list[keys.PanelGroup]:
        ttfts = [
            series.band(of.good_due_s, of.good_ttft_s, self._wide_edges) for of in self._requests
        ]
        tbts = [series.band(of.gap_at_s, of.gap_s, self._wide_edges) for of in self._requests]
        bands = {"TTFT": ttfts, "TBT": tbts}
        spans = {
            what: figures.span_of(
                [v for one in of if not one.is_empty for v in (one.p50, one.p99)],
                [_slo_s(run, what) for run in self.runs],
            )
            for what, of in bands.items()
        }
        panels = []
        for number, run in enumerate(self.runs):
            for what, of in bands.items():
                if not of[number].is_empty:
                    panels.append(self._latency_panel(run, what, of[number], spans[what]))
                elif len(self._requests[number].due_s):
                    self._lacks(run, f"any {what}")
        sentence = (
            "Time to the first token (of requests due then) and time between tokens (of tokens that"
            f" came then), of requests that ended well{self._binned(self._wide_edges)}. The SLO"
            " bounds a request's mean TBT, not every gap."
        )
        legend = [
            keys.KeyItem("median", ACCENT),
            keys.KeyItem("99th percentile", ACCENT, width=1.2),
            *keys.slo_keys(self.runs),
        ]
        return [keys.PanelGroup(sentence, legend, panels, columns=2)] if panels else []

    def _latency_panel(
        self, run: ReportedRun, what: str, of: series.Band, span_s: tuple[float, float]
    ) -> keys.Panel:
        slo_s = _slo_s(run, what)
        svg = figures.latency_over_time(self._name(), what, of, slo_s, span_s, self._until_s)
        return keys.Panel(svg, run.name, what) if self._title(run) else keys.Panel(svg, what)

    def _distributions(self) -> list[keys.PanelGroup]:
        panels = []
        for what, share_of, values in (
            ("TTFT", "requests", [of.good_ttft_s for of in self._requests]),
            ("TBT", "gaps between tokens", [of.gap_s for of in self._requests]),
        ):
            if not any(len(of) for of in values):
                continue
            slos = [_slo_s(run, what) for run in self.runs]
            span = figures.span_of(values, slos)
            of_runs = [series.cumulative(of) for of in values]
            svg = figures.distributions(self._name(), what, share_of, of_runs, slos, span)
            panels.append(keys.Panel(svg, what))
        sentence = (
            "The same as distributions: how large a share stayed within each time. Requests that"
            " failed are not in them."
        )
        legend = [*keys.run_keys(self.runs), *keys.slo_keys(self.runs)]
        return [keys.PanelGroup(sentence, legend, panels, columns=2)] if panels else []

    # -- goodput ------------------------------------------------------------------------------

    def _goodput(self) -> list[keys.PanelGroup]:
        for run in self.runs:
            if run.slo is None:
                self.notes.append(f"{run.name}: no SLO is known, so goodput is not drawn.")
        if any(run.slo is None for run in self.runs) or not len(self._requests[0].due_s):
            return []
        edges = self._wide_edges
        all_per_s = np.max([series.rates(of.due_s, edges) for of in self._requests], axis=0)
        met = [series.rates(of.due_s[of.is_met], edges) for of in self._requests]
        good = figures.goodput(self._name(), all_per_s, met, edges)
        met_keys = keys.run_keys(self.runs) or [keys.KeyItem("requests that met the SLO", ACCENT)]
        legend = [*met_keys, keys.KeyItem("all requests", LOAD, "area")]
        first = (
            "Requests per second that met the SLO, by when they were due, before all that were due:"
            " grey that shows are requests that missed it."
        )
        return [keys.PanelGroup(first, legend, [keys.Panel(good)])]

    # -- network and host memory --------------------------------------------------------------

    def _network(self) -> list[keys.PanelGroup]:
        of_runs = [series.traffic_rates(run, self._edges) for run in self.runs]
        kinds = [k for k in _KIND_WORDS if any(k in of for of in of_runs)]
        kinds += sorted({k for of in of_runs for k in of} - set(kinds))
        nothing = np.zeros(len(self._edges) - 1)
        stacks = [[of.get(kind, nothing) for kind in kinds] for of in of_runs]
        largest = max([float(np.sum(stack, axis=0).max()) for stack in stacks if stack] or [0])
        panels = []
        for run, stack in zip(self.runs, stacks, strict=True):
            if not run.carried_bytes:
                self._lacks(run, "the traffic of links, so network use is not drawn")
                continue
            svg = figures.network(self._name(), stack, self._edges, largest)
            panels.append(keys.Panel(svg, self._title(run)))
        legend = [
            keys.KeyItem(_KIND_WORDS.get(kind, kind), COLOURS[number % len(COLOURS)], "area")
            for number, kind in enumerate(kinds)
        ]
        sentence = (
            "Parameters that links carried, by kind of link; a byte counts once on every link that"
            " it crossed."
        )
        return [keys.PanelGroup(sentence, legend, panels)] if panels else []

    def _copies(self) -> list[keys.PanelGroup]:
        colours = self._colours
        of_runs = [series.host_copy_steps(run) for run in self.runs]
        totals = [series.stacked(of.values(), self._until_s)[1] for of in of_runs]
        largest = max(float(total.max()) for total in totals)
        panels = []
        for run, of in zip(self.runs, of_runs, strict=True):
            if not of:
                self._lacks(run, "any copy in host memory")
                continue
            by_colour: dict[str, list[series.Steps]] = {}
            for model in sorted(of, key=list(colours).index):
                by_colour.setdefault(colours[model], []).append(of[model])
            edges, _ = series.stacked(of.values(), self._until_s)
            layers = [
                (colour, np.sum([series.sampled(steps, edges[:-1]) for steps in group], axis=0))
                for colour, group in by_colour.items()
            ]
            svg = figures.copies(self._name(), layers, edges, largest)
            panels.append(keys.Panel(svg, self._title(run)))
        sentence = "Copies of models in the memory of hosts, from their order until they are gone."
        return [keys.PanelGroup(sentence, keys.model_keys(self._colours), panels)] if panels else []

    # -- helpers ------------------------------------------------------------------------------

    def _name(self) -> str:
        """Begins the ids of the next figure."""
        return f"f{next(self._numbers)}"

    def _title(self, run: ReportedRun) -> str:
        return run.name if len(self.runs) > 1 else ""

    def _lacks(self, run: ReportedRun, what: str) -> None:
        self.notes.append(f"{run.name}: the record does not have {what}.")

    def _binned(self, edges: series.Floats) -> str:
        return f", in bins of {edges[1] - edges[0]:g} s"


def _slo_s(run: ReportedRun, what: str) -> float | None:
    if run.slo is None:
        return None
    bound_ns = run.slo.ttft_ns if what == "TTFT" else run.slo.tbt_ns
    return None if bound_ns is None else bound_ns / NS_PER_S
