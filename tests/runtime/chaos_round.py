"""One round of chaos: a burst of streams, a scale-up, and something dies in the midst of it.

A pool lives through many rounds. What is in its memory, its descriptors and its record are looked
at when it is at rest again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until
from stage_faults import (
    ADDED,
    DRAINED,
    FEWER,
    REPLICAS,
    STAGE_FAULTS,
    PipelinesSeen,
    set_replicas,
    wait_for_replicas,
)

from livescale.control.controller import Controller
from livescale.lab.testbed.bed import Testbed
from livescale.messages.commands import AmendHolding, ChangeDuty, PlanMade, StartHolding
from livescale.messages.events import (
    BatchTaken,
    FeedFailed,
    HoldingFailed,
    LiveStarted,
    TeamBroke,
)
from livescale.messages.scale_plan import ScalePlan
from livescale.telemetry.record.record import RunLine, StepLine, read_record
from livescale.values.chunks import senders
from livescale.values.routes import Team
from livescale.values.types import AGENT_NUMBERS_FROM, InstanceId, WorkerRef, agent_ref
from slowness import patient

PAIR_FAULTS = ("helped", "helper", "umpire")
"""Who has just taken a batch over, who has handed it over while it loads, and the controller."""
ROLE_FAULTS = ("decoder", "prefiller", "matchmaker")
"""Who decodes what was just computed elsewhere, who has computed that, and the controller."""
HANDOVER_FAULTS = (*PAIR_FAULTS, *ROLE_FAULTS)
TEAM_FAULTS = ("leader", "member", "coach", "visit", "team_source")
"""Who leads the last team, another member, the controller, a member's link, and who sends the team
its parameters."""
LOAD_FAULTS = ("source", "link", "middle", "agent", "tail", "host", "controller")
WHOLE_FAULTS = (*LOAD_FAULTS, *HANDOVER_FAULTS, *TEAM_FAULTS)
STREAMS = 30
TOKENS = 60
LINK_BITS_PER_S = 25_000_000
"""About a second for the small model: long enough to be hit."""
LOAD_S = 1.2
AFTER_HANDOVER_S = 0.3
AFTER_TEAM_S = 0.8
AFTER_TOKENS_S = 1.0
BETWEEN_CHANGES_S = 2.0
PLAN_WAIT_S = 20.0
LOOK_S = 0.02
ANSWER_S = 120.0
MARKS = (StartHolding, FeedFailed, AmendHolding, HoldingFailed, LiveStarted, BatchTaken, TeamBroke)


@dataclass(slots=True)
class Look:
    """What a process held at rest, after a round."""

    round: int
    pid: int
    descriptors: int
    rss_bytes: int


@dataclass(slots=True)
class ChaosPool:
    """A pool, the network that it is in (if it can be cut), and who knows the right tokens."""

    pool: LocalPool
    bed: Testbed | None
    is_right: Callable[[list[Answer]], None]
    instances_min: int = 1
    looks: dict[str, list[Look]] = field(default_factory=dict)
    rounds: int = 0
    #: rounds in which a load lost a sender and was given another
    hurt_rounds: int = 0
    #: batches that were taken over in all rounds
    batches_taken: int = 0
    #: teams that were formed in all rounds
    teams_formed: int = 0
    #: rounds that hit a pipeline while requests went through it
    pipelines_hit: int = 0
    #: the last one in this round
    _team: Team | None = None
    #: made in this round
    _plans: list[ScalePlan] = field(default_factory=list)
    #: of the last one in this round: who took it over, and from whom
    _pair: tuple[WorkerRef, WorkerRef] | None = None
    _targets: dict[InstanceId, WorkerRef] = field(default_factory=dict)
    _pipelines: PipelinesSeen = field(default_factory=PipelinesSeen)
    _read_bytes: int = 0
    _seen: dict[type, int] = field(default_factory=lambda: dict.fromkeys(MARKS, 0))

    @property
    def members(self) -> int:
        return len(self.pool.pool.layout.seats)

    @property
    def agents(self) -> int:
        return len(self.pool.pool.layout.agents)

    @property
    def stages(self) -> int:
        """Of the model; 0 where it is whole."""
        return self.pool.pool.config.models[0].stages or 0

    # -- a round --------------------------------------------------------------------------------

    def round(self, fault: str, seed: int) -> str:
        """Everything ends, all tokens are right, and the pool is whole again. Says what was hit."""
        rng = random.Random(seed)
        self._new_plans()
        self._pair, self._team, self._plans = None, None, []
        if fault == ADDED:
            set_replicas(self.pool, FEWER)
            wait_for_replicas(self.pool, FEWER, self.stages, f"each stage has {FEWER}")
        answers, hit = asyncio.run(self._burst_with(fault, rng))
        assert [answer.error for answer in answers] == [None] * len(answers), hit
        assert [len(answer.token_ids) for answer in answers] == [TOKENS] * len(answers), hit
        self.is_right(answers)
        self.rest(hit)
        self.check_memory(hit)
        self._look()
        self.rounds += 1
        return f"{hit} ({self._marks()})"

    async def _burst_with(self, fault: str, rng: random.Random) -> tuple[list[Answer], str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=patient(ANSWER_S), limits=limits) as client:
            answers = [Answer(prompt(rng.randrange(40), 120)) for _ in range(STREAMS)]
            streams = [
                asyncio.create_task(answer.read(self.pool.url, client, TOKENS))
                for answer in answers
            ]
            everything = asyncio.gather(*streams)
            # With roles there may be nothing to load.
            has_plan = fault not in (*ROLE_FAULTS, *STAGE_FAULTS)
            plan = await self._first_plan(everything) if has_plan else None
            # The moment is random: anywhere in the scale-up, or just after it.
            if fault in STAGE_FAULTS:
                await self._first_tokens(answers, everything)
                await asyncio.sleep(rng.uniform(0, AFTER_TOKENS_S))
                self.pipelines_hit += not everything.done()
            elif fault in TEAM_FAULTS:
                await self._first_team(everything)
                await asyncio.sleep(rng.uniform(0, AFTER_TEAM_S))
            elif fault in HANDOVER_FAULTS:
                await self._first_pair(everything)
                await asyncio.sleep(rng.uniform(0, AFTER_HANDOVER_S))
            else:
                await asyncio.sleep(rng.uniform(0, LOAD_S))
            hit = await self._strike(fault, plan, rng)
            await everything
        return answers, hit

    async def _first_plan(self, streams: asyncio.Future) -> ScalePlan | None:
        for _ in range(int(patient(PLAN_WAIT_S) / LOOK_S)):
            plans = self._new_plans()
            if plans or streams.done():
                return plans[-1] if plans else None
            await asyncio.sleep(LOOK_S)
        return None

    async def _first_pair(self, streams: asyncio.Future) -> None:
        while self._pair is None and not streams.done():
            await asyncio.sleep(LOOK_S)
            self._new_plans()

    async def _first_team(self, streams: asyncio.Future) -> None:
        while self._team is None and not streams.done():
            await asyncio.sleep(LOOK_S)
            self._new_plans()

    async def _first_tokens(self, answers: list[Answer], streams: asyncio.Future) -> None:
        while not any(answer.token_ids for answer in answers) and not streams.done():
            await asyncio.sleep(LOOK_S)
        self._new_plans()

    def _new_plans(self) -> list[ScalePlan]:
        """Plans for instances that were recorded since the last call."""
        with self.pool.record.open("rb") as file:
            file.seek(self._read_bytes)
            news = file.read()
        end = news.rfind(b"\n") + 1
        scrap = self.pool.record.with_suffix(".news")
        scrap.write_bytes(news[:end])
        self._read_bytes += end
        steps = [line for line in read_record(scrap) if isinstance(line, StepLine)]
        words = [word for line in steps for word in (*line.events, *line.commands)]
        for kind in MARKS:
            self._seen[kind] += sum(isinstance(word, kind) for word in words)
        self._pipelines.absorb(words)
        for word in words:
            if isinstance(word, StartHolding) and word.duty is not None:
                self._targets[word.duty.instance] = word.holding.member
            elif isinstance(word, ChangeDuty) and word.duty.team not in (None, self._team):
                self._team = word.duty.team
                self.teams_formed += 1
            elif isinstance(word, BatchTaken):
                self._pair = word.worker, self._targets[word.target]
        plans = [w.plan for w in words if isinstance(w, PlanMade) and w.instances]
        self._plans += plans
        return plans

    def _marks(self) -> str:
        """What the round did to the loads."""
        self._new_plans()
        said = ", ".join(f"{kind.__name__} {self._seen[kind]}" for kind in MARKS)
        self.hurt_rounds += self._seen[AmendHolding] > 0
        self.batches_taken += self._seen[BatchTaken]
        self._seen = dict.fromkeys(MARKS, 0)
        return said

    # -- faults ---------------------------------------------------------------------------------

    async def _strike(self, fault: str, plan: ScalePlan | None, rng: random.Random) -> str:
        if fault == "controller":
            return self._kill([fault])
        if fault in STAGE_FAULTS:
            return await self._strike_stages(fault, rng)
        if fault in TEAM_FAULTS:
            return await self._strike_team(fault, rng)
        if fault in HANDOVER_FAULTS:
            if self._pair is None:
                return "did nothing: no batch was taken over"
            names = *map(_name, self._pair), "controller"
            return self._kill([names[HANDOVER_FAULTS.index(fault) % len(names)]])
        if plan is None:
            return "did nothing: no instance was planned"
        victim = _victim(fault, plan, rng) or agent_ref(rng.randrange(self.agents))
        if fault == "link":
            return await self._cut(victim, rng.uniform(0.1, 3.0))
        if fault == "host":
            return self._kill(self._names_on_host_of(victim))
        return self._kill([_name(victim)])

    async def _strike_team(self, fault: str, rng: random.Random) -> str:
        if self._team is None:
            return "did nothing: no team was formed"
        if fault == "coach":
            return self._kill(["controller"])
        workers = [member.partner.worker for member in self._team.members]
        if fault == "team_source":
            plans = [p for p in self._plans if any(load.receiver in workers for load in p.loads)]
            victim = _victim("source", plans[-1], rng)
            assert victim is not None
            return self._kill([_name(victim)])
        if fault == "visit":
            return await self._cut(rng.choice(workers), rng.uniform(0.1, 3.0))
        return self._kill([_name(workers[0] if fault == "leader" else rng.choice(workers[1:]))])

    async def _strike_stages(self, fault: str, rng: random.Random) -> str:
        if fault == "stage_controller":
            return self._kill(["controller"])
        if fault == ADDED:
            await asyncio.to_thread(set_replicas, self.pool, REPLICAS)
            return "added a replica to each stage"
        if fault == DRAINED:
            return await self._drain_replicas(rng)
        victim = self._pipelines.victim(fault, rng)
        if fault == "stage_link":
            # Some are cut for so long that the workers give each other up.
            return await self._cut(victim, rng.uniform(0.1, rng.choice([3.0, 3.0, 10.0])))
        return self._kill([_name(victim)])

    async def _drain_replicas(self, rng: random.Random) -> str:
        """The one that is to go is wanted again at any moment, or when it is gone."""
        pause_s = rng.uniform(0, BETWEEN_CHANGES_S)
        is_waited_for = rng.random() < 0.5
        await asyncio.to_thread(set_replicas, self.pool, FEWER)
        await asyncio.sleep(pause_s)
        if is_waited_for:
            what = f"each stage has {FEWER}"
            await asyncio.to_thread(wait_for_replicas, self.pool, FEWER, self.stages, what)
        await asyncio.to_thread(set_replicas, self.pool, REPLICAS)
        until = "until it was gone" if is_waited_for else f"for {pause_s:.2f} s"
        return f"drained a replica of each stage {until}"

    def _kill(self, names: list[str]) -> str:
        pids = self.pool.pool.pids()
        for name in names:
            if name in pids:
                os.kill(pids[name], signal.SIGKILL)
        return f"killed {' and '.join(names)}"

    async def _cut(self, victim: WorkerRef, seconds: float) -> str:
        assert self.bed is not None, "a link can be cut only in a testbed"
        place = self.bed.host_of(victim).name, None if victim.is_agent else 0
        await asyncio.to_thread(self.bed.cut, *place)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(self.bed.restore, *place)
        return f"cut the link of {victim} for {seconds:.2f} s"

    def _names_on_host_of(self, victim: WorkerRef) -> list[str]:
        layout = self.pool.pool.layout
        if victim.is_agent:
            host = layout.hosts[victim.worker - AGENT_NUMBERS_FROM].host.name
        else:
            host = layout.seats[victim.worker][0].host.name
        workers = [n for n, (seat, _) in enumerate(layout.seats) if seat.host.name == host]
        agents = [n for n, seat in layout.agents if seat.host.name == host]
        # One machine for all: losing it would be the end of the pool.
        lost = workers if len(layout.hosts) > 1 else workers[:1]
        return [f"worker {n}" for n in lost] + [f"agent {n}" for n in agents]

    # -- afterwards -----------------------------------------------------------------------------

    def rest(self, hit: str) -> None:
        """All members are back, the least number of instances is left, the host copies are there,
        and no KV is in use: at no stage, where there are stages."""
        wanted = {
            "workers": self.members,
            "agents": self.agents,
            "num_requests_running": 0,
            "instances": self.instances_min,
            "host_copies": min(self.agents, 1) * max(self.stages, 1),
        }
        for name, amount in wanted.items():
            wait_until(
                lambda name=name, amount=amount: self.pool.gauge(name) == amount,
                f"{name} is {amount} after we {hit}",
            )
        # Of one that is still loading the bytes are not there.
        wait_until(lambda: self.pool.serving() == self.instances_min, f"all serve after we {hit}")
        wait_until(lambda: self.pool.kv_in_use() == 0, f"no KV is in use after we {hit}")
        if self.stages:
            wait_for_replicas(self.pool, REPLICAS, self.stages, f"each serves after we {hit}")

    def check_memory(self, hit: str) -> None:
        """Every copy in every member's memory is the model, byte for byte."""
        held = self.pool.call(self.pool.pool.examine(), ANSWER_S)
        assert len(held) == self.members + self.agents, hit
        manifests = {entry.manifest.model: entry.manifest for entry in self.pool.pool.models}
        copies = [(ref, copy) for ref in sorted(held) for copy in held[ref]]
        for ref, copy in copies:
            right = tuple(layer.checksum for layer in manifests[copy.model].layers)
            assert copy.checksums == right, f"{ref} holds other bytes after we {hit}"
        assert any(ref.is_agent for ref, _ in copies) == (self.agents > 0)
        assert any(not ref.is_agent for ref, _ in copies)

    def _look(self) -> None:
        for name, pid in self.pool.pool.pids().items():
            process = psutil.Process(pid)
            look = Look(self.rounds, pid, process.num_fds(), process.memory_info().rss)
            self.looks.setdefault(name, []).append(look)


def _victim(fault: str, plan: ScalePlan, rng: random.Random) -> WorkerRef | None:
    """A member with this part in the plan, or any that has a part. None: no agent has one."""
    receivers = {load.receiver for load in plan.loads}
    sending = {upstream.worker for load in plan.loads for upstream in senders(load.feeds)}
    parts = {
        "source": sending - receivers,
        "middle": sending & receivers,
        "tail": receivers - sending,
        "agent": {ref for ref in sending if ref.is_agent},
    }
    if fault == "agent" and not parts[fault]:
        return None
    return rng.choice(sorted(parts.get(fault) or sending | receivers))


def _name(ref: WorkerRef) -> str:
    if ref.is_agent:
        return f"agent {ref.worker - AGENT_NUMBERS_FROM}"
    return f"worker {ref.worker}"


def check_invariants(record: Path) -> int:
    """The controller's state was whole after every step it ever made. Returns their number."""
    controller: Controller | None = None
    steps = 0
    for line in read_record(record):
        if isinstance(line, RunLine):
            controller = Controller(line.config)
        elif isinstance(line, StepLine):
            assert controller is not None
            controller.step(line.now_ns, line.events)
            controller.validate()
            steps += 1
    return steps
