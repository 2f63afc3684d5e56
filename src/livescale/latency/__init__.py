"""Pure: how long accelerators compute. Numbers in, nanoseconds out; nothing waits here."""
