"""Entry point of child processes: `python -m livescale.runtime.children.child KIND LOG_LEVEL`."""

from __future__ import annotations

import sys

from livescale.runtime.children.child_kinds import end_with_parent, live, run


def main() -> None:
    kind, level = sys.argv[1:]
    end_with_parent()
    if kind == "fork-server":
        # Imported here: none of the other kinds needs it.
        from livescale.runtime.children import fork_server

        live(kind, level, fork_server.main)
    run(kind, level)


if __name__ == "__main__":
    main()
