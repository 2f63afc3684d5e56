"""The house keeps its shape: imports point down, pure floors stay pure, words stay in use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rooms
from source_imports import FILES, MODULES, SOURCE, cycle_in, import_graph, imported, imports_in

TESTS = Path(__file__).parent

#: what each floor may import of livescale, besides itself
GROUND = {
    *("values", "messages", "common", "config", "clusters", "load"),
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
    "report": GROUND | {"telemetry"},
    "sim": GROUND | {"latency", "batching", "control", "member", "telemetry"},
    "runtime": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "transfer", "engine", "gateway"}
    | {"vllm_engine"},
    "cli": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "transfer", "engine", "gateway"}
    | {"report", "runtime"},
    "lab": GROUND
    | {"latency", "batching", "control", "member", "telemetry", "transfer", "engine", "gateway"}
    | {"vllm_engine", "report", "sim", "runtime", "cli"},
    "main": GROUND | {"cli", "lab"},
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
    "runtime/member_process/worker_process.py",
    "lab/bench/peers/engines/gloo_broadcast.py",
    "lab/bench/peers/engines/iteration_times.py",
    "lab/bench/peers/engines/judge.py",
    "lab/bench/peers/engines/library_loaders.py",
    "lab/bench/peers/engines/livescale_engine.py",
    "lab/bench/peers/engines/probed_worker.py",
    "lab/bench/peers/engines/stock_model.py",
    "lab/bench/peers/engines/transformers_batching.py",
    "lab/bench/peers/engines/transformers_generate.py",
    "lab/bench/peers/engines/vllm_offline.py",
}

BANNED = {
    r"class \w*(Manager|Helper|Replica)\b": "say what it does",
    r"\b(TODO|FIXME|XXX)\b": "do it, or write an issue",
    r"\bpickle\b": "msgspec: nothing from the network is unpickled",
    r"0\.0\.0\.0": "127.0.0.1",
}


#: which other interpreters there are is asked for here, not how to start this one
NAMES_INTERPRETERS = {"common/interpreter.py", "lab/bench/engines/load_bench.py"}


ROOM_FILES_MAX = 20
ROOM_LEVELS_MAX = 8
FILE_LINES_MAX = 450
CLASS_LINES_MAX = 400
#: files and classes that may be longer, and why
MAY_BE_LONG: dict[str, str] = {}
ARGUMENTS_MAX = 6
"""Besides self: what belongs together is a value."""
#: where functions may take more, and why
MAY_TAKE_MORE = {
    "engine/kernels/": "compiled code is given one array or number at a time",
    "engine/attention/": "attention has the interface of transformers, and compiled code",
}


def floor(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


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
            assert own.match("runtime/join/ray_*.py") or own.match("lab/bench/peers/ray_*.py"), path


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "process",
    [
        "gateway_process.gateway_process",
        "controller_process.controller_process",
        "member_process.worker_process",
        "member_process.agent_process",
        "models.prepare_process",
    ],
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


def test_modules_that_processes_are_started_with_exist() -> None:
    begins = {"module_words": "", "bench_process": "livescale.lab.bench."}
    wrong, seen = [], 0
    for path in [*FILES, *sorted(TESTS.rglob("*.py"))]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                texts = [
                    begins[call.func.id] + word.value
                    for word in call.args
                    if call.func.id in begins
                    and isinstance(word, ast.Constant)
                    and re.fullmatch(r"\w+(\.\w+)+", str(word.value))
                ]
                seen += len(texts)
                own = [text for text in texts if text.startswith("livescale.")]
                wrong += [f"{path}:{call.lineno}: {text}" for text in own if text not in MODULES]
    assert wrong == []
    assert seen > 30


def test_no_import_cycles_between_files() -> None:
    assert cycle_in(import_graph()) is None


def test_rooms_are_small_and_use_one_another_without_circles() -> None:
    assert cycle_in(rooms.room_graph()) is None
    files = rooms.files_by_room()
    assert {room: len(of) for room, of in files.items() if len(of) > ROOM_FILES_MAX} == {}
    deep = {room: rooms.levels_of(room) for room in files}
    assert {room: levels for room, levels in deep.items() if levels > ROOM_LEVELS_MAX} == {}


@pytest.mark.parametrize("command", ["serve", "join", "gateway"])
def test_the_product_runs_without_the_laboratory(command: str) -> None:
    reached = rooms.reached_from(f"livescale.cli.{command}")
    assert "livescale.runtime.wire.protocol" in reached
    assert {
        name for name in reached if name.startswith(("livescale.lab", "livescale.sim"))
    } == set()


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


def test_functions_take_few_arguments() -> None:
    wrong = []
    for path in FILES:
        if path.relative_to(SOURCE).as_posix().startswith(tuple(MAY_TAKE_MORE)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                names = [one.arg for one in given if one.arg not in ("self", "cls")]
                if len(names) > ARGUMENTS_MAX:
                    wrong.append(f"{path}:{node.lineno}: {node.name} takes {len(names)}")
    assert wrong == []


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
