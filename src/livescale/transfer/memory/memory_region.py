"""Memory that a carrier may read from and write into: what kind it is, on which device, and where.

Values only. The arena is host memory; device memory differs in its kind and in the number of its
device. A carrier that needs the processor for each byte (TCP, shared memory) takes host memory.
"""

from __future__ import annotations

import enum

import numpy as np

from livescale.values.types import Value


class MemoryKind(enum.IntEnum):
    """As written on the wire."""

    DRAM = 0
    VRAM = 1


class MemoryRegion(Value, frozen=True):
    """`size_bytes` from the address `start` on. `device` is the number of the device whose memory
    it is; 0 for host memory."""

    kind: MemoryKind
    device: int
    start: int
    size_bytes: int

    def part(self, offset_bytes: int, size_bytes: int) -> MemoryRegion:
        """So many bytes of it. Raises ValueError for bytes that it does not have."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset_bytes} leave {self}")
        return MemoryRegion(self.kind, self.device, self.start + offset_bytes, size_bytes)

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes of {self.kind.name} {self.device}"


def host_region(memory: memoryview) -> MemoryRegion:
    """Where this memory lies. It must outlive all use of the region."""
    start = np.frombuffer(memory, np.uint8).ctypes.data
    return MemoryRegion(MemoryKind.DRAM, 0, start, len(memory))
