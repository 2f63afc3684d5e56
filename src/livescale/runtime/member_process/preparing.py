"""A worker makes ready what takes long for models that may come, while it has nothing to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from livescale.member.member import Member
from livescale.values.types import Manifest


class Preparing:
    """Models one by one, on the thread of the member: what has come meanwhile is first."""

    def __init__(
        self,
        prepare: Callable[[Manifest], None],
        member: Member,
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        """`post` puts a piece of work behind what waits for the thread."""
        self._prepare = prepare
        self._member = member
        self._post = post
        self._models: deque[Manifest] = deque()
        self._is_posted = False

    def add(self, manifest: Manifest) -> None:
        """The model may come."""
        self._models.append(manifest)

    def go_on(self) -> None:
        """A step of the member is over."""
        if self._models and not self._is_posted and self._is_idle:
            self._is_posted = True
            self._post(self._prepare_next)

    def _prepare_next(self) -> None:
        self._is_posted = False
        if self._is_idle:
            self._prepare(self._models.popleft())

    @property
    def _is_idle(self) -> bool:
        return all(holding.is_spare for holding in self._member.holdings)

    def __repr__(self) -> str:
        return f"<Preparing, {len(self._models)} models wait>"
