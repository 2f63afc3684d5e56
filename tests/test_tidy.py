"""The house keeps its shape: imports point down, pure floors stay pure, words stay in use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "livescale"
FILES = sorted(SOURCE.rglob("*.py"))

#: what each floor may import of livescale, besides itself
GROUND = {
    *("types", "chunks", "plans", "routes", "stages", "policies", "placements", "bindings"),
    *("messages", "common", "config", "clusters", "load"),
}
FLOORS = {
    **dict.fromkeys(GROUND, GROUND),
    "latency": GROUND,
    "batching": GROUND | {"latency"},
    "control": GROUND,
    "member": GROUND | {"latency", "batching", "control"},
    "telemetry": GROUND | {"batching", "control", "member"},
    "transfer": GROUND,
    "engine": GROUND | {"latency", "batching"},
    "vllm_engine": GROUND | {"latency", "batching", "engine"},
    "gateway": GROUND,
    "client": GROUND,
    "testbed": GROUND,
    "report": GROUND | {"telemetry"},
    "sim": GROUND | {"latency", "batching", "control", "member", "telemetry"},
    "reproduce": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "report", "sim"},
    "runtime": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "transfer", "engine", "gateway"}
    | {"vllm_engine"},
    "bench": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "transfer", "engine", "gateway"}
    | {"client", "report", "sim", "runtime", "testbed", "vllm_engine"},
    "cli": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "transfer", "engine", "gateway"}
    | {"client", "report", "sim", "reproduce", "runtime", "bench", "testbed"},
}

#: all that the pure floors may use of other packages: values, containers, arithmetic
PURE_MODULES = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    # for what follows from values alone: `lru_cache`
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "typing",
}
#: torch, transformers and vLLM live in the engines alone (the worker sets torch's threads), and in
#: what a benchmark runs in processes of their own
HEAVY = {"torch", "transformers", "vllm"}
HEAVY_HOMES = {
    "engine",
    "vllm_engine",
    "runtime/worker_process.py",
    "bench/peers/gloo_broadcast.py",
    "bench/peers/iteration_times.py",
    "bench/peers/judge.py",
    "bench/peers/library_loaders.py",
    "bench/peers/livescale_engine.py",
    "bench/peers/probed_worker.py",
    "bench/peers/stock_model.py",
    "bench/peers/transformers_batching.py",
    "bench/peers/transformers_generate.py",
    "bench/peers/vllm_offline.py",
}

BANNED = {
    r"class \w*(Manager|Helper|Replica)\b": "say what it does",
    r"\b(TODO|FIXME|XXX)\b": "do it, or write an issue",
    r"\bpickle\b": "msgspec: nothing from the network is unpickled",
    r"0\.0\.0\.0": "127.0.0.1",
}


#: which other interpreters there are is asked for here, not how to start this one
NAMES_INTERPRETERS = {"common/interpreter.py", "bench/load_bench.py"}


FILE_LINES_MAX = 450
CLASS_LINES_MAX = 300
#: files and classes that may be longer, and why
MAY_BE_LONG = {
    "config/pool.py": "the table of settings, and nothing else",
    "config/pool.py: PoolConfig": "a table: one entry per setting, with its unit, bounds and help",
}


def floor(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


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


def test_imports_point_down() -> None:
    wrong = [
        f"{path}:{line}: {floor(path)} imports {name}"
        for path in FILES
        for name, line in imported(path)
        if not _points_down(floor(path), name.split("."))
    ]
    assert wrong == []


def _points_down(own: str, parts: list[str]) -> bool:
    if own == "__init__" or parts[0] != "livescale" or len(parts) < 2:
        return True
    return parts[1] in ("__version__", own) or parts[1] in FLOORS[own]


def test_pure_floors_use_pure_modules() -> None:
    wrong = [
        f"{path}:{line}: {name} is not pure"
        for path in FILES
        if floor(path) in ("control", "batching", "latency", "member")
        for name, line in imported(path)
        if name.split(".")[0] not in PURE_MODULES | {"livescale"}
    ]
    assert wrong == []


def test_heavy_libraries_stay_in_the_engine() -> None:
    for path in FILES:
        where = str(path.relative_to(SOURCE))
        if floor(path) in HEAVY_HOMES or where in HEAVY_HOMES:
            continue
        heavy = [name for name, _ in imported(path) if name.split(".")[0] in HEAVY]
        assert not heavy, f"{where} imports {heavy}"


def test_ray_is_imported_in_its_place_alone() -> None:
    for path in FILES:
        if any(name.split(".")[0] == "ray" for name, _ in imported(path)):
            own = path.relative_to(SOURCE)
            assert own.match("runtime/ray_*.py") or own.match("bench/peers/ray_*.py"), path


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "process",
    ["gateway_process", "controller_process", "worker_process", "agent_process", "prepare_process"],
)
def test_light_processes_load_no_heavy_library(process: str) -> None:
    code = f"import sys, livescale.runtime.{process}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_no_process_imports_from_its_working_directory() -> None:
    """`-m` comes right after `-P` wherever it is written, and only `common/interpreter.py` knows
    how processes of this interpreter are started."""
    for path in [*FILES, *sorted(Path(__file__).parent.rglob("*.py"))]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if '"-m"' in text else ():
            words: list[ast.expr] = []
            if isinstance(node, (ast.List, ast.Tuple)):
                words = node.elts
            elif isinstance(node, ast.Call):
                words = node.args
            texts = [part.value if isinstance(part, ast.Constant) else None for part in words]
            for before, word in zip([None, *texts], texts, strict=False):
                assert word != "-m" or before == "-P", f"{path}:{node.lineno}: -m without -P"
    for path in FILES:
        if str(path.relative_to(SOURCE)) in NAMES_INTERPRETERS:
            continue
        assert "sys.executable" not in path.read_text(), f"{path}: see livescale.common.interpreter"
        names = [name for name, _ in imported(path) if name.split(".")[0] == "multiprocessing"]
        assert not names, f"{path} imports {names}: see livescale.common.interpreter"


def test_no_import_cycles_between_files() -> None:
    assert cycle_in(import_graph()) is None


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


@pytest.mark.parametrize(
    "code",
    [
        'importlib.import_module("livescale.cli.serve")',
        'import_module("livescale.cli.serve").run()',
        '__import__("livescale.cli.serve")',
        'runpy.run_module("livescale.cli.serve")',
        'def f(kind):\n    import_module(_KINDS[kind])\n_KINDS = {"a": "livescale.cli.serve"}',
        'def f():\n    import_module(_NAME)\n_NAME = "livescale.cli.serve"',
        'def f(name):\n    import_module(f"livescale.cli.{name}")',
    ],
)
def test_imports_whose_names_are_strings_are_seen(code: str) -> None:
    """They count for the floors, and close circles."""
    own, other = "livescale.cli.serve_run", "livescale.cli.serve"
    seen = {name for name, _ in imports_in(ast.parse(code), own)}
    assert other in seen
    assert not _points_down("runtime", other.split("."))
    graph = {own: seen & MODULES.keys() - {own}, other: {own}}
    assert cycle_in({**import_graph(), **graph}) is not None


@pytest.mark.parametrize(
    "code",
    [
        "import_module(name)",
        'import_module("live" + "scale.cli")',
        "load = importlib.import_module",
        "from importlib import import_module as load",
        'import_module(f"{name}.serve")',
    ],
)
def test_imports_that_cannot_be_seen_are_refused(code: str) -> None:
    with pytest.raises(AssertionError):
        imports_in(ast.parse(code), "file.py")


def test_one_class_per_word() -> None:
    seen: dict[str, Path] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in seen, f"{node.name}: {seen[node.name]} and {path}"
                seen[node.name] = path


def test_banned_words() -> None:
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, instead in BANNED.items():
                assert not re.search(pattern, line), f"{path}:{number}: {line.strip()}: {instead}"


def test_every_file_says_what_it_is_for() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_files_and_classes_are_short() -> None:
    too_long = set()
    for path in FILES:
        text, where = path.read_text(), str(path.relative_to(SOURCE))
        if len(text.splitlines()) > FILE_LINES_MAX:
            too_long.add(where)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= CLASS_LINES_MAX:
                    too_long.add(f"{where}: {node.name}")
    assert sorted(too_long - MAY_BE_LONG.keys()) == [], "find what is hiding inside"
    assert sorted(MAY_BE_LONG.keys() - too_long) == [], "these are short now: off the list"


def test_test_files_have_different_names() -> None:
    """pytest imports them without their folders: of two with one name only one is found."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, files in names.items() if files > 1] == []


def test_what_starts_a_pool_is_of_the_real_stage() -> None:
    """Its tests run one at a time; two pools at once would starve one another."""
    for path in sorted(TESTS.rglob("test_*.py")):
        names = {name.split(".")[-1] for name, _ in imported(path)}
        if names & {"LocalPool", "ChaosPool"}:
            uses = 'usefixtures("machine")' in path.read_text()
            assert uses, f"{path} starts a pool and does not use the fixture machine"
