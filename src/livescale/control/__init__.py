"""Pure: every decision about the pool. Time and ids are arguments; nothing here does I/O."""
