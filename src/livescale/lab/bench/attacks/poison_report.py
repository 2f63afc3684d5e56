"""What poison prompts and broken models came to, for people and as figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from livescale.lab.bench.attacks.broken_models import BrokenWay

RESTARTS_MAX = 2
"""A broken model costs the pool so many workers at most."""
_SHOWN_MAX = 5
_CUT_CHARS = 150


@dataclass(slots=True)
class PromptFigures:
    """One kind of poison prompt: its answers ("400 foreign_token", "closed": none), how many of
    them are not right, and after how long the slowest came."""

    name: str
    answers: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    slowest_s: float = 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "answers": dict(self.answers),
            "wrong_answers": self.wrong,
            "slowest_s": self.slowest_s,
        }


@dataclass(slots=True)
class BrokenFigures:
    """One broken model: what publication answered ("": it was in the configuration), what its
    requests were answered, the words of the first refusal, when the last answer was there, and
    what it cost."""

    name: str
    arrival: BrokenWay
    published: str = ""
    answers: Counter[str] = field(default_factory=Counter)
    words: str = ""
    after_s: float = 0.0
    failed_loads: int = 0
    #: why workers were lost while it was there
    losses: list[str] = field(default_factory=list)

    @property
    def is_within(self) -> bool:
        is_answered = not self.answers["closed"] and self.published != "closed"
        return is_answered and len(self.losses) <= RESTARTS_MAX

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "arrival": self.arrival.value,
            "published": self.published,
            "answers": dict(self.answers),
            "words": self.words,
            "after_s": self.after_s,
            "failed_loads": self.failed_loads,
            "workers_lost": len(self.losses),
            "losses": self.losses,
            "is_within": self.is_within,
        }


@dataclass(slots=True)
class PoisonFigures:
    """All of it. `requests` are those of the streams; `errors` say how some of them ended early,
    `losses` which workers were lost before the first broken model, and why."""

    streams: int
    requests: int = 0
    tokens: int = 0
    wrong_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    prompts: list[PromptFigures] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    models: list[BrokenFigures] = field(default_factory=list)
    #: that serve at the end
    workers: int = 0
    workers_wanted: int = 0

    @property
    def is_within(self) -> bool:
        """All bounds are kept."""
        return (
            self.requests > 0
            and not self.errors
            and not self.wrong_tokens
            and not self.losses
            and self.workers == self.workers_wanted
            and not any(kind.wrong for kind in self.prompts)
            and all(model.is_within for model in self.models)
        )

    def as_json(self) -> dict[str, object]:
        return {
            "streams": self.streams,
            "stream_requests": self.requests,
            "streams_ended_early": len(self.errors),
            "tokens": self.tokens,
            "wrong_tokens": self.wrong_tokens,
            "prompts": sum(kind.answers.total() for kind in self.prompts),
            "workers_lost_to_prompts": len(self.losses),
            "losses": self.losses,
            "workers_at_end": self.workers,
            "by_prompt": [kind.as_json() for kind in self.prompts],
            "by_model": [model.as_json() for model in self.models],
            "is_within": self.is_within,
            **({"errors": self.errors[:_SHOWN_MAX]} if self.errors else {}),
        }

    def text(self) -> str:
        figures = self.as_json()
        lines = [
            f"streams       {self.requests} requests of {self.streams} streams, ended early:"
            f" {len(self.errors)}; {self.tokens} tokens, wrong: {self.wrong_tokens}",
            f"prompts       {figures['prompts']}, workers lost: {len(self.losses)}",
            *(_prompt_line(kind) for kind in self.prompts),
            f"models        {len(self.models)}, workers at the end: {self.workers}"
            f" of {self.workers_wanted}",
            *(line for model in self.models for line in _model_lines(model)),
        ]
        lines += [f"ended early: {error}" for error in self.errors[:_SHOWN_MAX]]
        lines += [f"lost: {loss}" for loss in self.losses]
        if not self.is_within:
            lines.append("<- out of bounds")
        return "\n".join(lines)


# -- helpers --------------------------------------------------------------------------------------


def _counted(answers: Counter[str]) -> str:
    return ", ".join(f"{count} x {answer}" for answer, count in sorted(answers.items()))


def _prompt_line(kind: PromptFigures) -> str:
    end = f"  <- {kind.wrong} not right" if kind.wrong else ""
    return f"  {kind.name:<42} {kind.slowest_s:>6.2f} s  {_counted(kind.answers)}{end}"


def _model_lines(model: BrokenFigures) -> list[str]:
    published = f"published: {model.published}; " if model.published else "configured; "
    asked = f"asked: {_counted(model.answers)}" if model.answers else "not asked"
    end = "" if model.is_within else "  <- out of bounds"
    lines = [
        f"  {model.name:<42} {model.after_s:>6.2f} s  lost {len(model.losses)},"
        f" failed loads {model.failed_loads}  {published}{asked}{end}"
    ]
    words = model.words if len(model.words) <= _CUT_CHARS else f"{model.words[:_CUT_CHARS]} …"
    return [*lines, f"      {words}"] if words else lines
