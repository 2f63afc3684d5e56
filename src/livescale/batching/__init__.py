"""Pure: what one instance runs next. No I/O, no clock, no torch (a test lists what may be used)."""
