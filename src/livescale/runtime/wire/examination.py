"""What is in the members' memory, byte for byte: asked of a running pool by tests and people.

Also run as a program, where a pool's network is not the own one (`examine_inside`).
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Collection

import msgspec
import xxhash

from livescale.common.interpreter import module_words
from livescale.runtime.wire import protocol
from livescale.runtime.wire.doors import CONTROLLER_DOOR, open_credentials
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.wire_channel import Wire, open_wire
from livescale.values.types import LayerEntry, Manifest, Value, WorkerRef

_ANSWER_S = 60.0


class ExaminationError(Exception):
    """The controller or a member did not answer."""


class ExamineBoot(Value, frozen=True):
    """Whom to ask."""

    secret: str
    controller: protocol.Address
    lost_after_ms: int = 5000
    tls_dir: str | None = None


def held_copy(
    manifest: Manifest, memory: memoryview, present: Collection[int], rank: int = 0
) -> protocol.HeldCopy:
    """The checksums of the layers that are there, of a model that starts where `memory` does."""
    checksums = tuple(
        layer_checksum(entry, memory) if entry.layer in present else None
        for entry in manifest.layers
    )
    return protocol.HeldCopy(manifest.model, checksums, rank)


def layer_checksum(entry: LayerEntry, memory: memoryview) -> str:
    """Of the bytes that are there now, of a layer whose model starts where `memory` does."""
    stop = entry.offset_bytes + entry.size_bytes
    return xxhash.xxh3_64_hexdigest(memory[entry.offset_bytes : stop])


async def examine(boot: ExamineBoot) -> dict[WorkerRef, tuple[protocol.HeldCopy, ...]]:
    """What every member holds. Raises ExaminationError; OSError where no controller listens."""
    wire: Wire[protocol.ToExaminer] = await open_wire(
        boot.controller,
        protocol.ToExaminer,
        secret=boot.secret,
        door=CONTROLLER_DOOR,
        tls=open_credentials(boot.tls_dir),
    )
    call = secrets.token_hex(8)
    wire.send(protocol.GatewayHello(f"examiner {call}"))
    wire.send(protocol.Examine(call))
    heartbeats = Heartbeats(boot.lost_after_ms)
    heartbeats.add(wire)
    beating = asyncio.create_task(heartbeats.run())
    try:
        return await asyncio.wait_for(_answers(wire), _ANSWER_S)
    except TimeoutError:
        raise ExaminationError(f"no answer within {_ANSWER_S:g} s") from None
    finally:
        beating.cancel()
        wire.close()


async def _answers(
    wire: Wire[protocol.ToExaminer],
) -> dict[WorkerRef, tuple[protocol.HeldCopy, ...]]:
    members: tuple[WorkerRef, ...] | None = None
    held: dict[WorkerRef, tuple[protocol.HeldCopy, ...]] = {}
    async for message in wire:
        if isinstance(message, protocol.Examining):
            members = message.members
        elif isinstance(message, protocol.Examined):
            held[message.member] = message.copies
        if members is not None and len(held) == len(members):
            return held
    raise ExaminationError(f"the controller closed the connection: {wire.error}")


def examine_inside(
    prefix: tuple[str, ...], boot: ExamineBoot
) -> dict[WorkerRef, tuple[protocol.HeldCopy, ...]]:
    """`examine` from where `prefix` runs commands. Blocks. Raises ExaminationError."""
    done = subprocess.run(
        [*prefix, *module_words("livescale.runtime.wire.examination")],
        input=msgspec.json.encode(boot),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise ExaminationError(done.stderr.decode(errors="replace").strip())
    answers = msgspec.json.decode(
        done.stdout, type=tuple[tuple[WorkerRef, tuple[protocol.HeldCopy, ...]], ...]
    )
    return dict(answers)


def main() -> None:
    """Ask for what standard input says and print the answer."""
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=ExamineBoot)
    try:
        held = asyncio.run(examine(boot))
    except (OSError, ExaminationError) as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(sorted(held.items())))


if __name__ == "__main__":
    main()
