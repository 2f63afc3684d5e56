"""What the ParameterPool remembers of stages besides their copies (QUART §6.1): which are key, and
which host was given an instance of which stage when.

Whether a copy can be read is the copy's own affair: `Copy.is_complete` means that every layer was
verified when it came, and a model that is withdrawn invalidates its copies (`ParameterPool.retire`)
before its name can mean anything else.
"""

from __future__ import annotations

from livescale.control.stages.key_stages import KeyStage
from livescale.values.types import WorkerRef


class StageSchedule:
    """Key stages by name, and the history by stage and by the agent of the host."""

    def __init__(self) -> None:
        #: grows when a stage is marked as key, or as key no longer
        self.version = 0
        self._keys: dict[str, KeyStage] = {}
        self._given_ns: dict[str, dict[WorkerRef, int]] = {}

    def mark(self, now_ns: int, model: str, key: KeyStage | None) -> None:
        """The stage is key, or not (None)."""
        was_key = bool(self.key_reason(now_ns, model))
        if key is None:
            self._keys.pop(model, None)
        else:
            self._keys[model] = key
        self.version += was_key != bool(self.key_reason(now_ns, model))

    def key_reason(self, now_ns: int, model: str) -> str:
        """Why the stage is key: `over_target` or `longest_queue` (empty: it is none)."""
        key = self._keys.get(model)
        return key.reason if key is not None and now_ns < key.until_ns else ""

    def given(self, model: str, agent: WorkerRef, now_ns: int) -> None:
        """An instance of the stage was ordered on this agent's host."""
        self._given_ns.setdefault(model, {})[agent] = now_ns

    def given_ns(self, model: str, agent: WorkerRef) -> int:
        """When that was last so (0: never, or in an earlier life of the controller)."""
        return self._given_ns.get(model, {}).get(agent, 0)

    def lose(self, agent: WorkerRef) -> None:
        """The host's memory is gone, and with it what the history is for."""
        for given in self._given_ns.values():
            given.pop(agent, None)

    def forget_model(self, model: str) -> None:
        """The model leaves the pool."""
        self._keys.pop(model, None)
        self._given_ns.pop(model, None)

    def __repr__(self) -> str:
        return f"<StageSchedule, key: {', '.join(self._keys) or 'none'}>"
