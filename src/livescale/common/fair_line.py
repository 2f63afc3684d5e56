"""A bounded amount of waiting requests that clients share: who may still come.

Pure, and the same in a gateway and in a simulated one.
"""

from __future__ import annotations

from dataclasses import dataclass

OVERFULL = 2
"""A line holds at most so many times its bound, for the sake of clients below their share."""


@dataclass(slots=True)
class _Amounts:
    """What waits: of one client, or in all."""

    requests: int = 0
    prompt_tokens: int = 0


class FairLine:
    """How many requests and prompt tokens wait, of whom, and which more may come.

    Up to the bound all may. Above, up to OVERFULL times the bound, those of a client may that has
    no more than its fair share with them, or none yet: the bound, divided by the number of clients
    that wait, itself among them. So a client that fills the line fills it for itself. Into an empty
    line anything may go: a request above the bound would never be served. All calls take O(1).
    """

    def __init__(self, requests_max: int, prompt_tokens_max: int | None = None) -> None:
        """None: prompt tokens have no bound."""
        self._requests_max = requests_max
        self._prompt_tokens_max = prompt_tokens_max
        self._all = _Amounts()
        self._of: dict[str, _Amounts] = {}

    @property
    def requests(self) -> int:
        return self._all.requests

    @property
    def prompt_tokens(self) -> int:
        return self._all.prompt_tokens

    @property
    def clients(self) -> int:
        """Clients that have a request waiting."""
        return len(self._of)

    def requests_of(self, client: str) -> int:
        return self._of[client].requests if client in self._of else 0

    def takes_requests(self, client: str, requests: int) -> bool:
        """So many more of the client's requests may come."""
        own = self.requests_of(client)
        return self._takes(client, requests, own, self._all.requests, self._requests_max)

    def takes_prompt_tokens(self, client: str, tokens: int) -> bool:
        """Requests of the client with so many more prompt tokens may come."""
        if self._prompt_tokens_max is None:
            return True
        own = self._of[client].prompt_tokens if client in self._of else 0
        return self._takes(client, tokens, own, self._all.prompt_tokens, self._prompt_tokens_max)

    def add(self, client: str, requests: int, prompt_tokens: int) -> None:
        """They wait from now on, within the bounds or not."""
        for amounts in (self._all, self._of.setdefault(client, _Amounts())):
            amounts.requests += requests
            amounts.prompt_tokens += prompt_tokens

    def remove(self, client: str, requests: int, prompt_tokens: int) -> None:
        """They wait no longer."""
        own = self._of[client]
        for amounts in (self._all, own):
            amounts.requests -= requests
            amounts.prompt_tokens -= prompt_tokens
            assert amounts.requests >= 0, f"{self!r}"
            assert amounts.prompt_tokens >= 0, f"{self!r}"
        if not own.requests:
            del self._of[client]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.requests} requests, {self.prompt_tokens} prompt tokens"
            f" of {self.clients} clients>"
        )

    def _takes(self, client: str, more: int, own: int, total: int, most: int) -> bool:
        if not self._all.requests or total + more <= most:
            return True
        clients = self.clients + (client not in self._of)
        is_fair = not own or (own + more) * clients <= most
        return is_fair and total + more <= OVERFULL * most
