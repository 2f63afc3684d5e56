"""The host agent's process: a host's memory, and what moves models into it. No torch.

Main thread: MemberThread. One more thread runs the wire to the controller; the DataPlane has its
own threads for parameters.
"""

from __future__ import annotations

from livescale.member.member import ADDRESS_SPACES
from livescale.runtime.boot import AgentBoot, read_boot
from livescale.runtime.member_process import MemberSocket, open_data_plane
from livescale.runtime.member_thread import MemberSetting, MemberThread
from livescale.runtime.recording import member_maker
from livescale.transfer.arena import Arena
from livescale.transfer.orders import ContentChecks


def main() -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone."""
    boot = read_boot(AgentBoot)
    # What a network card has registered cannot be given back: there it is as large as the memory.
    spaces = 1 if boot.carrier == "nixl" else ADDRESS_SPACES
    memory = Arena(spaces * boot.host.memory_bytes, boot.touched_bytes)
    data_plane = open_data_plane(boot, boot.agent, boot.host, memory)
    socket = MemberSocket(boot, boot.agent, boot.host, data_plane)
    setting = MemberSetting(
        storage_bytes_per_s=boot.host.storage_bytes_per_s,
        # A copy is given to many, for long: once, its bytes are held against the manifest's hash.
        content_checks=ContentChecks.ALL,
        lost_after_ms=boot.lost_after_ms,
        stuck_after_ms=boot.stuck_after_ms,
    )
    size_bytes = boot.host.memory_bytes
    with member_maker(boot.record_members, boot.agent) as make_member:
        member = make_member(boot.agent, size_bytes, address_bytes=memory.size_bytes)
        socket.serve(MemberThread(member, memory, data_plane, socket.to_controller, setting))
