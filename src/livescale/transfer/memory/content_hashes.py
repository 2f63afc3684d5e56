"""SHA-256 of whole layers, computed beside the threads that receive and send.

Which layers are hashed, and what follows from a hash, is decided in the reception.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from livescale.values.types import WorkerRef

_log = logging.getLogger(__name__)

# As many layers are hashed at a time: a checksum is not, so that it keeps up with a fast network.
_THREADS = 2
# Between two pieces a thread looks whether the hash is still wanted.
_PIECE_BYTES = 32 << 20


class ContentHashes:
    """A few threads, started when the first layer comes. Thread-safe."""

    def __init__(self, worker: WorkerRef) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"{worker} hashes")

    def start(
        self, content: memoryview, is_wanted: Callable[[], bool], then: Callable[[str], None]
    ) -> None:
        """Hash these bytes and call `then` with the digest, on a thread of its own; not at all
        once it is not wanted, or after `close`. The bytes must stay readable until `close`."""
        try:
            self._threads.submit(self._hash, content, is_wanted, then)
        except RuntimeError:  # closed, and nothing waits for it
            content.release()

    def close(self) -> None:
        """The threads are gone, and read nothing any more. Idempotent."""
        self._threads.shutdown(cancel_futures=True)

    def _hash(
        self, content: memoryview, is_wanted: Callable[[], bool], then: Callable[[str], None]
    ) -> None:
        hasher = hashlib.sha256()
        # Released early: who wants the memory back must not wait for Python to forget the view.
        with content:
            for start in range(0, len(content), _PIECE_BYTES):
                if not is_wanted():
                    return
                hasher.update(content[start : start + _PIECE_BYTES])
        try:
            then(hasher.hexdigest())
        except Exception:
            # The pool's threads would keep it to themselves.
            _log.exception("what followed from a content hash failed")
