"""Listening sockets that a supervisor keeps for its children: here, or where their network is.

Run as a program inside a network namespace it makes one there and hands it over; a socket stays in
the network that it was made in, wherever its descriptor goes.
"""

from __future__ import annotations

import errno
import socket
import subprocess
import sys

from livescale.common.addresses import family_of
from livescale.common.interpreter import module_words
from livescale.common.settings import ConfigError

_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError when the address cannot be had."""
    return _listen(host, port, is_shared=False)


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """So many listening sockets on one port (0: a free one), among which the system deals out the
    connections. ConfigError when the address cannot be had."""
    # Alone at first: a port that another pool of this user shares among its own sockets is taken.
    found = [listen(host, port)]
    try:
        if count > 1:
            found[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared_port = found[0].getsockname()[1]
        while len(found) < count:
            found.append(_listen(host, shared_port, is_shared=True))
    except BaseException:
        for listener in found:
            listener.close()
        raise
    return found


def _listen(host: str, port: int, is_shared: bool) -> socket.socket:
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use. Choose another port (0 for any free port)"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def listen_inside(prefix: tuple[str, ...], host: str, port: int = 0) -> socket.socket:
    """A listening socket on a port of `host` (0: a free one), made where `prefix` runs commands.

    Raises ConfigError when the address cannot be had there.
    """
    if not prefix:
        return listen(host, port)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [*prefix, *module_words("livescale.runtime.supervisor.listening", host, str(port))],
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            raise ConfigError(f"{' '.join(prefix)}: {done.stderr.strip() or done.returncode}")
        _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


def main() -> None:
    """Give the process at the other end of standard input a listening socket."""
    try:
        listener = listen(sys.argv[1], int(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))
    with socket.socket(fileno=0) as parent:
        socket.send_fds(parent, [b"."], [listener.fileno()])


if __name__ == "__main__":
    main()
