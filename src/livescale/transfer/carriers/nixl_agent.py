"""NIXL itself: the agent of this process, the memory it knows, the peers it knows, and reads.

What the reads are for, and who waits for them, is not known here. NIXL's bytes about a peer go to
its own parser, and only after the peer has proved that it belongs to the pool. UCX itself asks for
no proof: over TCP, any process that reaches its port reads and writes all memory of the process.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import secrets
import threading
from typing import Any

import psutil

from livescale.transfer.formats.carrier import ChannelClosedError
from livescale.transfer.memory.memory_region import MemoryKind, MemoryRegion
from livescale.values.types import Value

_PACKAGE = "nixl_cu12._bindings"
# Its own thread would spin without a pause, and take a whole core of an idle process.
_PROGRESS_PAUSE_US = 1000


class ReadState(enum.Enum):
    """What is known of a read. All but `UNDER_WAY` are final."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"
    #: NIXL has lost track of it: it may write at any time
    UNKNOWN = "unknown"


class Read(Value, frozen=True):
    """A read from the peer that was begun; `handle` is NIXL's."""

    handle: int
    peer: str


class NixlAgent:
    """Thread-safe, but for one read: its calls are one thread's at a time.

    Raises ImportError, with what to install, where NIXL is missing, and ChannelClosedError for
    everything that NIXL refuses.
    """

    def __init__(self, host: str) -> None:
        """Uses the network interface that has the address `host`."""
        try:
            self._nixl: Any = importlib.import_module(_PACKAGE)
        except ImportError as error:
            raise ImportError(
                f"carrier nixl needs pip install 'livescale[rdma]': {error}"
            ) from error
        self._kinds = {
            MemoryKind.DRAM: self._nixl.DRAM_SEG,
            MemoryKind.VRAM: self._nixl.VRAM_SEG,
        }
        self._lock = threading.Lock()
        # By name: channels with the peer, and reads from it that have not ended.
        self._uses: dict[str, int] = {}
        _choose_network(host)
        with _as_closed("cannot start"):
            self._agent = self._new_agent()
            self._backends = [self._agent.createBackend("UCX", {})]

    def about(self) -> bytes:
        """What a peer must know to read from the memory that is registered now."""
        with _as_closed("cannot describe its memory"):
            about: bytes = self._agent.getLocalMD()
            return about

    def register(self, region: MemoryRegion) -> None:
        """The region can be read, and read into, until the agent closes."""
        place = (region.start, region.size_bytes, region.device, "")
        with _as_closed(f"cannot use {region}"):
            regions = self._nixl.nixlRegDList(self._kinds[region.kind], [place])
            self._agent.registerMem(regions, self._backends)

    def know(self, about: bytes) -> str:
        """The name by which NIXL knows the peer that sent this about itself, until `forget`."""
        with self._lock, _as_closed("cannot understand the other side"):
            name: str = self._agent.loadRemoteMD(about).decode()
            self._uses[name] = self._uses.get(name, 0) + 1
            return name

    def forget(self, peer: str) -> None:
        """One `know` of the peer is taken back.

        NIXL does not follow reads any more of a peer that was forgotten, and they still write. So
        the peer is known to NIXL until its last read has ended.
        """
        with self._lock:
            self._uses[peer] -= 1
            if not self._uses[peer]:
                del self._uses[peer]
                # NIXL has forgotten a peer itself that has gone.
                with contextlib.suppress(OSError), _as_closed("cannot forget a peer"):
                    self._agent.invalidateRemoteMD(peer)

    def begin_read(self, into: MemoryRegion, peer: str, source: MemoryRegion) -> Read:
        """The peer's bytes are coming into the region. It cannot be called back."""
        own, theirs = (
            self._nixl.nixlXferDList(
                self._kinds[region.kind], [(region.start, region.size_bytes, region.device)]
            )
            for region in (into, source)
        )
        with self._lock:
            self._uses[peer] += 1
        try:
            with _as_closed("cannot read"):
                handle: int = self._agent.createXferReq(
                    self._nixl.NIXL_READ, own, theirs, peer, "", self._backends
                )
                self._agent.postXferReq(handle)
        except OSError:
            self.forget(peer)
            raise
        return Read(handle, peer)

    def state(self, read: Read) -> ReadState:
        """Of the read. Not to be asked again behind a final state: what it held is released."""
        try:
            status = self._agent.getXferStatus(read.handle)
        except self._nixl.nixlNotFoundError:
            return ReadState.UNKNOWN
        # All others come from the network: the end of this read, or of the way to the peer.
        except Exception:
            return self._end(read, ReadState.FAILED)
        if status == self._nixl.NIXL_IN_PROG:
            return ReadState.UNDER_WAY
        return self._end(read, ReadState.DONE)

    def tell(self, peer: str, message: bytes) -> None:
        """The peer's agent is sent the message."""
        with _as_closed("cannot tell the other side"):
            self._agent.genNotif(peer, message, self._backends)

    def told(self) -> list[tuple[str, bytes]]:
        """Who sent which messages since the last call; those of one peer in their order."""
        with _as_closed("cannot receive from the other side"):
            notices: dict[str, list[bytes]] = self._agent.getNotifs({}, self._backends)
        return [(peer, message) for peer, messages in notices.items() for message in messages]

    def close(self) -> None:
        """Nothing is read or written any more."""
        self._agent = None

    def _end(self, read: Read, state: ReadState) -> ReadState:
        with contextlib.suppress(OSError), _as_closed("cannot release a read"):
            self._agent.releaseXferReq(read.handle)
        self.forget(read.peer)
        return state

    def _new_agent(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_PAUSE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        return self._nixl.nixlAgent(f"livescale-{secrets.token_hex(8)}", config)

    def __repr__(self) -> str:
        return f"<NixlAgent {len(self._uses)} peers>"


def _choose_network(host: str) -> None:
    """UCX uses and listens on the interface that has this address, and no other; with TCP, unless
    the environment (UCX_NET_DEVICES, UCX_TLS) says what to use."""
    if "UCX_NET_DEVICES" in os.environ:
        return
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(address.address == host for address in addresses):
            os.environ["UCX_NET_DEVICES"] = name
            os.environ.setdefault("UCX_TLS", "tcp")
            return
    raise OSError(f"no interface has the address {host}: set UCX_NET_DEVICES")


@contextlib.contextmanager
def _as_closed(what: str) -> Any:
    """NIXL's own errors have no class in common but Exception."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ChannelClosedError(f"NIXL {what}: {error}") from error
