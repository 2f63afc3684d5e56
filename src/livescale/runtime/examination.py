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

from livescale.interpreter import module_words
from livescale.runtime.doors import CONTROLLER_DOOR
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.wire import (
    Address,
    Examine,
    Examined,
    Examining,
    GatewayHello,
    HeldCopy,
    ToExaminer,
)
from livescale.runtime.wire_channel import Wire, open_wire
from livescale.types import Manifest, Value, WorkerRef

_ANSWER_S = 60.0


class ExaminationError(Exception):
    """The controller or a member did not answer."""


class ExamineBoot(Value, frozen=True):
    """Whom to ask."""

    secret: str
    controller: Address
    lost_after_ms: int = 5000


def held_copy(
    manifest: Manifest, memory: memoryview, present: Collection[int], rank: int = 0
) -> HeldCopy:
    """The checksums of the layers that are there, of a model that starts where `memory` does."""
    checksums = []
    for entry in manifest.layers:
        checksum = None
        if entry.layer in present:
            stop = entry.offset_bytes + entry.size_bytes
            hasher = xxhash.xxh3_64()
            hasher.update(memory[entry.offset_bytes : stop])
            checksum = hasher.hexdigest()
        checksums.append(checksum)
    return HeldCopy(manifest.model, tuple(checksums), rank)


async def examine(boot: ExamineBoot) -> dict[WorkerRef, tuple[HeldCopy, ...]]:
    """What every member holds. Raises ExaminationError; OSError where no controller listens."""
    wire: Wire[ToExaminer] = await open_wire(
        boot.controller, ToExaminer, secret=boot.secret, door=CONTROLLER_DOOR
    )
    call = secrets.token_hex(8)
    wire.send(GatewayHello(f"examiner {call}"))
    wire.send(Examine(call))
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


async def _answers(wire: Wire[ToExaminer]) -> dict[WorkerRef, tuple[HeldCopy, ...]]:
    members: tuple[WorkerRef, ...] | None = None
    held: dict[WorkerRef, tuple[HeldCopy, ...]] = {}
    async for message in wire:
        if isinstance(message, Examining):
            members = message.members
        elif isinstance(message, Examined):
            held[message.member] = message.copies
        if members is not None and len(held) == len(members):
            return held
    raise ExaminationError(f"the controller closed the connection: {wire.error}")


def examine_inside(
    prefix: tuple[str, ...], boot: ExamineBoot
) -> dict[WorkerRef, tuple[HeldCopy, ...]]:
    """`examine` from where `prefix` runs commands. Blocks. Raises ExaminationError."""
    done = subprocess.run(
        [*prefix, *module_words("livescale.runtime.examination")],
        input=msgspec.json.encode(boot),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise ExaminationError(done.stderr.decode(errors="replace").strip())
    answers = msgspec.json.decode(
        done.stdout, type=tuple[tuple[WorkerRef, tuple[HeldCopy, ...]], ...]
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
