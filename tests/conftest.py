"""Fixtures that several floors share: small models, made once per run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: two test processes on two cores must not oversubscribe.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The first import on a machine asks a process for the fonts, which no deterministic test may do.
import matplotlib.font_manager  # noqa: F401
import pytest
from filelock import FileLock
from hypothesis import settings

import effort
import slowness
import stages
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec, TestbedError

# A job in a shell's background ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


#: tests of the real stage that may pass at the second try, in one run
FLAKY_MAX = 3
FIRST_TRY_LINES = 40

stages.hook()


MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> MadeOnce:
    """A directory that one test process makes and all of them read."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "made-once"
    root.mkdir(exist_ok=True)

    def directory(name: str, make: Callable[[Path], None]) -> Path:
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.made").exists():
                (root / name).mkdir()
                make(root / name)
                (root / f"{name}.made").touch()
        return root / name

    return directory


@pytest.fixture(scope="session")
def tiny_model(made_once: MadeOnce) -> Path:
    """A model of about 3 MB. Tests that change files copy it first."""
    # Imported here: torch takes seconds, and the process that hands out the tests needs none.
    from livescale.engine.files.make import make_model

    return made_once("shared", lambda root: make_model(root / "tiny", "tiny")) / "tiny"


@pytest.fixture(scope="session")
def machine() -> None:
    """Whatever uses it belongs to the real stage, whose deadlines follow from how slow the machine
    is (`slowness.patient`)."""


@pytest.fixture(scope="session")
def network_namespaces(machine: None) -> None:
    """Skips what asks for it where no testbed can be built, and says why: the smallest is tried."""
    try:
        with Testbed(NetworkSpec(hosts=1, link_bits_per_s=1_000_000_000)):
            pass
    except TestbedError as error:
        pytest.skip(f"no testbed here: {error}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="what make test leaves out, and only that")
    parser.addoption("--stage", choices=(stages.DETERMINISTIC, stages.REAL), help="only this one")
    parser.addoption("--rounds", type=int, help="rounds of chaos (default: one, of hosts three)")
    parser.addoption("--seed", type=int, default=0, help="seed of the first round of chaos")
    parser.addoption("--faults", help="of chaos, in turn: comma-separated (default: all)")
    parser.addoption("--pool", help="of all rounds of chaos: timed, real, pair, ...")


def pytest_configure(config: pytest.Config) -> None:
    effort.set_long(config.getoption("long"))
    # A deadline would be an absolute time: examples may wait for compilers and other processes.
    # The gate tries the same examples every time, so that what fails is what was changed; --long
    # tries new ones, and a failure is printed with what repeats it.
    settings.register_profile(
        "any machine",
        deadline=None,
        max_examples=effort.examples(100),
        derandomize=not config.getoption("long"),
        print_blob=True,
    )
    settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)  # Hypothesis marks its tests in a hook of the same name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long what has no mark "long"; with it what has the mark, and whatever tries more
    then: all properties, and what is marked so."""
    stage = config.getoption("stage")
    wanted = [
        item
        for item in items
        if _is_wanted(item, is_long=config.getoption("long"))
        and stage in (None, stages.stage_of(item))
    ]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted
    for item in items:
        if item.get_closest_marker("hypothesis"):
            # An example that failed once has shown a fault.
            item.add_marker(pytest.mark.flaky(reruns=0))
            seconds = config.getini("timeout")
            if seconds and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(float(seconds) * effort.times()))


def _is_wanted(item: pytest.Item, *, is_long: bool) -> bool:
    if not is_long:
        return item.get_closest_marker("long") is None
    return any(item.get_closest_marker(name) for name in ("long", "more", "hypothesis"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures before the plugin for timeouts reads its own: that is a deadline, too."""
    if stages.stage_of(item) == stages.REAL:
        slowness.measure()
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else item.config.getini("timeout")
        if seconds:
            deadline = pytest.mark.timeout(slowness.patient(float(seconds)))
            item.add_marker(deadline, append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if stages.stage_of(item) == stages.REAL:
        return (yield)
    with stages.deterministic():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
    """What only this test asked for is watched, too; a fixture that others share is not its own."""
    if fixturedef.scope != "function" or stages.stage_of(request.node) == stages.REAL:
        return (yield)
    with stages.deterministic():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("rerun", []):
        # What forgives a first failure must not hide its cause.
        terminalreporter.write_line(f"first try of {report.nodeid}:")
        for text in (report.longreprtext, *(content for _, content in report.sections)):
            for line in text.splitlines()[-FIRST_TRY_LINES:]:
                terminalreporter.write_line(f"    {line}")
    for name in _flaky(terminalreporter):
        terminalreporter.write_line(f"flaky: {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A rerun forgives a busy machine; one that forgives everything would hide a fault."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and exitstatus == 0 and len(_flaky(reporter)) > FLAKY_MAX:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _flaky(reporter: pytest.TerminalReporter) -> list[str]:
    return sorted({report.nodeid for report in reporter.stats.get("rerun", [])})
