"""Where the parameters lie that are computed with: in the arena itself, or in a device's memory.

A CPU computes from the bytes where they arrived. A device with its own memory gets every layer
copied when it is complete, always to the same addresses.
"""

import torch

from livescale.types import LayerEntry


class ParameterMemory:
    """A device's view of one arena at a time.

    `device_bytes` is allocated once, here; 0 means that the device computes from the arena itself.
    """

    def __init__(self, device: torch.device, device_bytes: int) -> None:
        assert device.type == "cpu" or device_bytes, f"{device} cannot read the arena"
        self._own = (
            torch.empty(device_bytes, dtype=torch.uint8, device=device) if device_bytes else None
        )
        self._arena = torch.empty(0, dtype=torch.uint8)

    def attach(self, arena: memoryview) -> None:
        """Take layers from this arena from now on. It is writable and fits (asked by `fits`)."""
        assert self.fits(arena.nbytes), f"{arena.nbytes} bytes of arena"
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)

    def fits(self, size_bytes: int) -> bool:
        """A model of this size can be placed."""
        return self._own is None or size_bytes <= len(self._own)

    def place(self, entry: LayerEntry) -> torch.Tensor:
        """Flat bytes (uint8) of the device, in which the complete layer lies at its offset."""
        if self._own is None:
            return self._arena
        layer = slice(entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
        # Blocks until the bytes are there: whoever runs next may use them on any stream.
        self._own[layer].copy_(self._arena[layer])
        return self._own

    def detach(self) -> None:
        """Hold the arena no longer."""
        self._arena = torch.empty(0, dtype=torch.uint8)
