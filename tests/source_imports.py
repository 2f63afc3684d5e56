"""What each file of the source imports, wherever in the file, and by names in strings, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "livescale"
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Full names of everything a file imports, wherever in the file, with the line."""
    return imports_in(ast.parse(path.read_text()), str(path))


def imports_in(tree: ast.Module, where: str) -> list[tuple[str, int]]:
    """Those of one file: by statements, and by names in strings."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}:{node.lineno}: relative import"
            names.append((node.module or "", node.lineno))
            names += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return names + imports_by_name(tree, where)


#: what imports a module that a string names
IMPORTERS = {"import_module", "__import__", "run_module", "resolve_name"}


def imports_by_name(tree: ast.Module, where: str) -> list[tuple[str, int]]:
    """What `importlib.import_module` and its like import. The name is in the call, or in a constant
    of the file; one that begins so (`f"livescale.cli.{name}"`) stands for each module that does."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            renamed = [a.name for a in node.names if a.asname and a.name in IMPORTERS]
            assert not renamed, f"{where}:{node.lineno}: {renamed} under another name"
        if not (
            (isinstance(node, ast.Attribute) and node.attr in IMPORTERS)
            or (isinstance(node, ast.Name) and node.id in IMPORTERS)
        ):
            continue
        assert id(node) in called, f"{where}:{node.lineno}: an importer that is not called here"
        call = called[id(node)]
        argument = call.args[0] if call.args else call
        texts = list(strings_of(argument, constants))
        assert texts, f"{where}:{node.lineno}: an import of what no constant names"
        for text, is_whole in texts:
            found = [text] if is_whole else [n for n in MODULES if n.startswith(text)]
            assert found, f"{where}:{node.lineno}: nothing begins with {text!r}"
            names += [(name, node.lineno) for name in found]
    return names


def strings_of(node: ast.AST, constants: dict[str, ast.expr]) -> Iterator[tuple[str, bool]]:
    """Strings that an expression may be, or begin with, and whether that is all of it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, True
    elif isinstance(node, ast.JoinedStr):
        if isinstance(node.values[0], ast.Constant):
            yield str(node.values[0].value), False
    elif isinstance(node, ast.Name):
        if node.id in constants:
            yield from strings_of(constants[node.id], {})
    elif isinstance(node, ast.Subscript):
        yield from strings_of(node.value, constants)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from strings_of(value, constants)


@cache
def import_graph() -> dict[str, set[str]]:
    return {
        name: {imp for imp, _ in imported(path) if imp in MODULES and imp != name}
        for name, path in MODULES.items()
    }


def cycle_in(graph: dict[str, set[str]]) -> str | None:
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> str | None:
        if name in trail:
            return " -> ".join((*trail, name))
        if name not in done:
            for following in sorted(graph[name]):
                if cycle := visit(following, (*trail, name)):
                    return cycle
            done.add(name)
        return None

    return next((cycle for name in sorted(graph) if (cycle := visit(name, ()))), None)
