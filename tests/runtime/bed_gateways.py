"""A gateway in a host of a testbed, and a way to it from outside of the testbed's network."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import httpx
from joiners import JoinedGateway, closing
from pool_thread import LocalPool, wait_until

from livescale.lab.testbed.bed import Testbed
from slowness import patient

_PORT = 8000
# Takes connections at a socket that it was given, and carries them to an address of its network.
_RELAY = """
import asyncio, socket, sys

async def carry(reader, writer):
    try:
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def accepted(reader, writer):
    try:
        from_there, there = await asyncio.open_connection(sys.argv[2], int(sys.argv[3]))
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(carry(reader, there), carry(from_there, writer))

async def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    async with await asyncio.start_server(accepted, sock=listener) as server:
        await server.serve_forever()

asyncio.run(main())
"""


class BedGateway:
    """`url` stays the same when the gateway's process is another one."""

    def __init__(self, bed: Testbed, host: str, scratch: Path, tls_dir: Path) -> None:
        self.host = host
        self._bed = bed
        self._scratch = scratch
        self._tls_dir = tls_dir
        self._address = bed.host(host).devices[0].address
        self._joined: JoinedGateway | None = None
        self._lives = 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            number = listener.fileno()
            words = [sys.executable, "-P", "-c", _RELAY, str(number), self._address, str(_PORT)]
            self._relay: subprocess.Popen[bytes] = bed.exec(host, words, pass_fds=(number,))

    @property
    def joined(self) -> JoinedGateway:
        assert self._joined is not None
        return self._joined

    def join(self, head: LocalPool) -> None:
        """Start it, and wait until it serves."""
        self._lives += 1
        scratch = self._scratch / f"{self.host}-{self._lives}"
        scratch.mkdir()
        own = ("--host", self._address, "--port", str(_PORT), "--tls-dir", str(self._tls_dir))
        inside = self._bed.inside(self.host)
        self._joined = JoinedGateway(head, self.host, scratch, *own, prefix=inside)
        wait_until(self.is_ready, f"the gateway on {self.host} serves")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=patient(10)).status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        if self._joined is not None:
            with closing(self._joined):
                pass

    def __exit__(self, *_: object) -> None:
        self.close()
        self._relay.kill()
        self._relay.wait()

    def __enter__(self) -> BedGateway:
        return self
