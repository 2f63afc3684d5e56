"""The one reader of what a controller received and ordered.

`Follower` turns each step into changes and keeps what is there now; `read_history` follows a whole
record. Scale events, timelines, host memory, usage and news are views of these.
"""
