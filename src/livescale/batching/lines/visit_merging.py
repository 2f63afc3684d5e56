"""Runs of several leaders, or ways, that wait at an instance of a stage are carried out as one.

What an execution costs besides its tokens is then paid once. Between members nothing changes: each
Run came by itself, and its rows or tokens go on by themselves. Leaders have KV blocks of their own,
and no two Runs of one leader have a request or a block that one of them writes in common, so their
segments do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from livescale.batching.contract.visit_messages import Visit
from livescale.values.types import RequestId


def count_merged(line: Iterable[Visit], tokens_max: int) -> int:
    """How many of the first visits in line (one at least) are one execution: as long as they have
    no more than `tokens_max` positions together, and no request twice.

    A request stands there twice, with two attempts, where its first leader was given up.
    """
    count = tokens = 0
    requests: dict[RequestId, None] = {}
    for visit in line:
        own = [segment.request for segment in visit.segments]
        tokens += visit.positions
        if count and (tokens > tokens_max or any(request in requests for request in own)):
            break
        requests.update(dict.fromkeys(own))
        count += 1
    return count
