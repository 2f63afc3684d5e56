"""A newcomer's path: the commands of README.md as they stand there, in a fresh clone (root).

`python tests/newcomer.py` (part of `make proof`, about ten minutes) clones this repository into an
empty folder and goes through README's blocks in their order: the installation with its demo, the
quickstart, several models, more machines, observability and simulation. `make test` is left out.
Everything after the installation runs inside network namespaces, in which the addresses of README
are those of machines: what another machine is to type is typed there. A command that fails, or a
server that is not ready in time, ends it with its own words and status 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import slowness

ROOT = Path(__file__).parent.parent
_READY_S = 60.0
#: a line of `serve` (processes are "… ready after", too)
_SERVES = "\nready after"
#: in order, or by Ctrl-C
_ENDS = (0, 128 + signal.SIGINT)
#: README's head node and the two machines beside it
_HEAD, _NODE, _WEB = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class PathError(Exception):
    """A command of README did not do what README says."""


def blocks(title: str, language: str = "sh") -> list[list[str]]:
    """The commands of each block of a section of README, comments left out."""
    section = (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return [_commands(block) for block in found]


def _commands(block: str) -> list[str]:
    whole = block.replace("\\\n", " ")
    lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in whole.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class Machine:
    """Where commands are typed: in a clone of this repository, on a machine with that address."""

    def __init__(self, clone: Path, address: str, namespace: str) -> None:
        self._clone = clone
        self._prefix = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c"]
        self._name = f"machine-{address.rpartition('.')[2]}"

    def run(self, command: str, wait_s: float = 120.0) -> str:
        """What it printed. Raises PathError for one that fails."""
        ended = subprocess.run(
            self._words(command),
            cwd=self._clone,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=slowness.patient(wait_s),
            check=False,
        )
        if ended.returncode:
            raise PathError(f"$ {command}\n{ended.stdout}{ended.stderr}(status {ended.returncode})")
        print(f"$ {command}", flush=True)
        return ended.stdout

    @contextmanager
    def running(self, command: str, until: str) -> Iterator[None]:
        """It goes on until Ctrl-C, which it ends by in order. Raises PathError where it does not
        print `until` in time, or does not end so."""
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                self._words(f"exec {command}"),
                cwd=self._clone,
                env=environment(),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

            def words() -> str:
                said.seek(0)
                return said.read()

            try:
                deadline_s = time.monotonic() + slowness.patient(_READY_S)
                while until not in words():
                    if process.poll() is not None or time.monotonic() > deadline_s:
                        raise PathError(f"$ {command}\n{words()}(never printed {until!r})")
                    time.sleep(0.1)
                print(f"$ {command}", flush=True)
                yield
                process.send_signal(signal.SIGINT)
                if process.wait(slowness.patient(_READY_S)) not in _ENDS:
                    raise PathError(f"$ {command}\n{words()}(status {process.returncode})")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _words(self, command: str) -> list[str]:
        activated = ". .venv/bin/activate" if (self._clone / ".venv").is_dir() else "true"
        return [*self._prefix, f"hostname {self._name}; {activated}; {command}"]


def environment() -> Mapping[str, str]:
    """That of a shell which knows nothing of LiveScale."""
    names = ("HOME", "LANG", "PATH", "TERM", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE")
    return {name: os.environ[name] for name in names if name in os.environ}


@contextmanager
def machines(clone: Path) -> Iterator[dict[str, Machine]]:
    """By address, on one switch."""
    own = f"newcomer{os.getpid()}"
    with ExitStack() as stack:

        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True)

        switch = f"{own}s"
        ip("netns", "add", switch)
        stack.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        found = {}
        for address in (_HEAD, _NODE, _WEB):
            number = address.rpartition(".")[2]
            name, port = f"{own}m{number}", f"port{number}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "switch", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            found[address] = Machine(clone, address, name)
        yield found


def install(clone: Path) -> None:
    """README's installation, which ends with the demo."""
    for command in blocks("Install")[0]:
        if command == "make test":
            continue  # the rest of the proof has run it
        print(f"$ {command}", flush=True)
        subprocess.run(command, shell=True, cwd=clone, env=environment(), check=True)


def quickstart(head: Machine) -> None:
    activate, make, serve, ask = blocks("Quickstart")[0]
    assert activate == ". .venv/bin/activate"
    head.run(make)
    [shown] = blocks("Quickstart", "json")
    with head.running(serve, _SERVES):
        answer = json.loads(head.run(ask))
        if answer.keys() != json.loads(" ".join(shown)).keys():
            raise PathError(f"$ {ask}\n{answer}\n(README shows other fields)")


def several_models(head: Machine, clone: Path) -> None:
    section = (ROOT / "README.md").read_text().split("\n## Several models")[1]
    document = re.findall(r"^```yaml\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[0]
    (clone / "pool.yaml").write_text(document)
    serve = re.search(r"livescale serve -c \S+", document)
    assert serve is not None
    for name in ("other", "third"):
        head.run(f"livescale models make models/{name} --preset small")
    with head.running(serve.group(), _SERVES):
        for command in blocks("Several models, scale to zero")[0]:
            head.run(command)


def more_machines(found: Mapping[str, Machine], clone: Path) -> None:
    serve, join, gateway = blocks("More machines")[0]
    with found[_HEAD].running(serve, _SERVES):
        # The clone is on all of these machines, and so is the token.
        assert (clone / "pool.token").is_file()
        with (
            found[_NODE].running(join, "are ready"),
            found[_WEB].running(gateway, "is ready after"),
        ):
            for machine in (found[_HEAD], found[_WEB]):
                machine.run(blocks("Quickstart")[0][-1])


def observe(head: Machine) -> None:
    metrics, top, serve, *after = blocks("Observability, simulation")[0]
    with head.running(serve, _SERVES):
        head.run(blocks("Quickstart")[0][-1])
        head.run(metrics)
        with head.running(top, "small"):
            pass
    for command in after:
        head.run(command)


def main() -> int:
    if os.geteuid():
        print("the newcomer's path needs root: it makes network namespaces", file=sys.stderr)
        return 2
    slowness.measure()
    # A shell starts what runs in its background without Ctrl-C, and that would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="livescale-newcomer-") as scratch:
        clone = Path(scratch) / "livescale"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        try:
            install(clone)
            with machines(clone) as found:
                quickstart(found[_HEAD])
                several_models(found[_HEAD], clone)
                more_machines(found, clone)
                observe(found[_HEAD])
        except (PathError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    print("the newcomer's path: every command of README did what it says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
