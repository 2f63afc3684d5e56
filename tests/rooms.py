"""The rooms of the source, from the files and their imports: one room is one folder with files.

`python tests/rooms.py` prints the part of docs/architecture.md that is made from them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter

from source_imports import MODULES, SOURCE, import_graph


def room_of(module: str) -> str:
    """`lab/bench/live`; "" for files that stand beside the floors."""
    return MODULES[module].parent.relative_to(SOURCE).as_posix().removeprefix(".")


@cache
def files_by_room() -> dict[str, list[str]]:
    """The modules of each room; a folder's `__init__` says what it is for and is not counted."""
    rooms = defaultdict(list)
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            rooms[room_of(module)].append(module)
    return dict(sorted(rooms.items()))


def room_graph() -> dict[str, set[str]]:
    """Which rooms each room imports from."""
    return _folded(import_graph(), room_of)


def floor_graph() -> dict[str, set[str]]:
    """The same for floors: the folders at the top."""
    return _folded(import_graph(), lambda module: room_of(module).split("/")[0])


def _folded(graph: dict[str, set[str]], name_of: Callable[[str], str]) -> dict[str, set[str]]:
    folded: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        if MODULES[module].name != "__init__.py":
            names = {name_of(name) for name in imported if name != "livescale"}
            folded[name_of(module)] |= names - {name_of(module)}
    return dict(sorted(folded.items()))


def levels_of(room: str) -> int:
    """How many files of a room import one another in a row, at most."""
    own = set(files_by_room()[room])
    graph = {module: import_graph()[module] & own for module in own}
    levels: dict[str, int] = {}
    for module in TopologicalSorter(graph).static_order():
        levels[module] = 1 + max((levels[name] for name in graph[module]), default=0)
    return max(levels.values())


def reached_from(module: str) -> set[str]:
    """All that is imported when this module is."""
    graph, seen, waiting = import_graph(), set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def picture() -> str:
    """Floors as a graph (an arrow that others imply is left out), rooms as a table."""
    graph = floor_graph()
    below: dict[str, set[str]] = {}
    for floor in TopologicalSorter(graph).static_order():
        below[floor] = set(graph[floor]).union(*(below[name] for name in graph[floor]))
    lines = ["```mermaid", "graph TD"]
    for floor, direct in graph.items():
        implied = set().union(*(below[name] for name in direct))
        lines += [f"    {floor or 'main'} --> {name}" for name in sorted(direct - implied)]
    lines += ["```", "", "| room | files | what it is for | rooms of its floor that it uses |"]
    lines.append("| --- | --- | --- | --- |")
    used = room_graph()
    for room, files in files_by_room().items():
        if room:
            words = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text()))
            first = (words or "").split("\n")[0]
            floor = room.split("/")[0]
            inner = sorted(name for name in used[room] if name.split("/")[0] == floor)
            names = ", ".join(f"`{name.removeprefix(floor + '/')}`" for name in inner)
            lines.append(f"| `{room}/` | {len(files)} | {first} | {names} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(picture(), end="")
