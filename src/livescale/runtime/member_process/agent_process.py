"""The host agent's process: a host's memory, and what moves models into it. No torch.

Main thread: MemberThread. One more thread runs the wire to the controller; the DataPlane has its
own threads for parameters.
"""

from __future__ import annotations

from livescale.member.member import ADDRESS_SPACES
from livescale.runtime.member_process.member_process import MemberSocket, open_data_plane
from livescale.runtime.member_process.member_thread import MemberThread
from livescale.runtime.wire.boot import AgentBoot, read_boot
from livescale.telemetry.recording import member_maker
from livescale.transfer.memory.arena import Arena


def main() -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone."""
    boot = read_boot(AgentBoot)
    size_bytes = boot.place.memory_bytes
    # What a network card has registered cannot be given back: there it is as large as the memory.
    spaces = 1 if boot.pool.carrier == "nixl" else ADDRESS_SPACES
    memory = Arena(spaces * size_bytes, boot.touched_bytes)
    data_plane = open_data_plane(boot, memory)
    socket = MemberSocket(boot, data_plane)
    with member_maker(boot.record_members, boot.member) as make_member:
        member = make_member(boot.member, size_bytes, address_bytes=memory.size_bytes)
        socket.serve(MemberThread(boot, member, memory, data_plane, socket.to_controller))
