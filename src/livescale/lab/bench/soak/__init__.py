"""`bench soak`: a real pool serves a counted number of requests while faults are struck."""
