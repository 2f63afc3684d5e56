"""Guests of a pool: processes of other systems that get a model from it, and from one another."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from pool_thread import LocalPool, wait_until

from livescale.common.addresses import parse_address
from livescale.common.errors import UserError
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.messages.commands import StartHolding
from livescale.messages.events import AgentJoined
from livescale.runtime.guest.guest import Guest, GuestAs, GuestError
from livescale.runtime.guest.guest_child import GuestChild
from livescale.runtime.guest.guest_messages import GuestTerms
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.token import read_token
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.chunks import senders
from livescale.values.types import FromWorker, Manifest, WorkerRef
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """One worker serves; each data plane sends so slowly that loads overlap."""
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("head"),
        "    min_replicas: 1\n    max_replicas: 1\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=1,
        listen="127.0.0.1:0",
        host_memory_bytes=0,
        lost_after_ms=patient_ms(10_000),
        uplink_bytes_per_s=3_000_000,
        downlink_bytes_per_s=100_000_000,
    ) as local:
        local.wait_ready()
        yield local


def guest(pool: LocalPool, name: str, **values: object) -> Guest:
    assert pool.pool.token_file is not None
    host, port = parse_address(pool.pool.join_address, "head", is_own=False)
    terms = {"model": "tiny", "name": name, "address": "127.0.0.1", "patience_s": patient(60.0)}
    secret = read_token(pool.pool.token_file).secret
    return Guest(Address(host, port), secret, GuestAs(**(terms | values)))  # type: ignore[arg-type]


@contextlib.contextmanager
def there(*guests: Guest) -> Iterator[None]:
    for one in guests:
        one.begin()
    try:
        yield
    finally:
        for one in guests:
            one.end()


def content(one: Guest) -> list[str]:
    """Of each layer, in order."""
    found = []
    for arrived in one.layers():
        assert arrived.number == len(found)
        memory = one.memory.view(arrived.offset_bytes, arrived.manifest.size_bytes)
        found.append(hash_of(arrived.manifest, memory, arrived.number))
    return found


def content_of_child(child: GuestChild) -> list[str]:
    return [hash_of(*there) for there in child.layers()]


def hash_of(manifest: Manifest, memory: memoryview, layer: int) -> str:
    entry = manifest.layers[layer]
    return xxhash.xxh3_128_hexdigest(
        memory[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    )


def right(model: Path) -> list[str]:
    manifest = read_manifest(model, "tiny")
    memory = memoryview(bytearray(manifest.size_bytes))
    list(read_layers(model, manifest, memory))
    return [hash_of(manifest, memory, layer) for layer in range(len(manifest.layers))]


def orders(pool: LocalPool) -> list[StartHolding]:
    """To guests, the earliest first."""
    lines = (line for line in read_record(pool.record) if isinstance(line, StepLine))
    commands = (command for line in lines for command in line.commands)
    return [c for c in commands if isinstance(c, StartHolding) and c.holding.member.is_agent]


def joined(pool: LocalPool) -> dict[WorkerRef, str]:
    """The names of all guests that ever were there."""
    lines = (line for line in read_record(pool.record) if isinstance(line, StepLine))
    events = (event for line in lines for event in line.events)
    return {e.agent: e.host.name for e in events if isinstance(e, AgentJoined)}


def feeders(pool: LocalPool, last: int) -> dict[WorkerRef, WorkerRef]:
    """Who got everything from whom, of the last orders."""
    wait_until(lambda: len(orders(pool)) >= last, "the record has them")
    found = {}
    for order in orders(pool)[-last:]:
        (upstream,) = senders(order.feeds)
        assert isinstance(upstream, FromWorker)
        found[order.holding.member] = upstream.worker
    return found


def test_guests_get_the_model_byte_by_byte_and_feed_one_another(
    pool: LocalPool, tiny_model: Path
) -> None:
    guests = [guest(pool, f"guest{number}") for number in range(3)]
    before = len(orders(pool))
    with there(*guests):
        assert [content(one) for one in guests] == [right(tiny_model)] * 3
        assert content(guests[0]) == right(tiny_model), "it may be read again"
        found = feeders(pool, last=3)
    assert len(orders(pool)) == before + 3
    sources = [source for source in found.values() if not source.is_agent]
    assert len(sources) == 1, found
    assert len(dict.fromkeys(found.values())) == 3, f"a chain: each sends to one at most: {found}"


def test_one_that_leaves_keeps_nothing_of_the_pool(pool: LocalPool) -> None:
    one = guest(pool, "leaves")
    with there(one):
        content(one)
        wait_until(lambda: pool.gauge("agents") == 1, "it is a member")
    wait_until(lambda: pool.gauge("agents") == 0, "it has left")


def test_a_model_that_the_pool_does_not_have_is_refused_by_name(pool: LocalPool) -> None:
    one = guest(pool, "strange", model="giant")
    with there(one), pytest.raises(GuestError, match=r"no model 'giant' .* Available: tiny"):
        content(one)


def test_a_pool_that_is_not_there_is_an_error_in_time() -> None:
    words = GuestAs(model="tiny", name="g", address="127.0.0.1", patience_s=0.2)
    one = Guest(Address("127.0.0.1", 9), "0" * 32, words)
    with there(one), pytest.raises(GuestError, match=r"127\.0\.0\.1:9: Connection refused"):
        content(one)


def terms(pool: LocalPool, name: str, **values: object) -> GuestTerms:
    own = GuestTerms(pool.pool.join_address, str(pool.pool.token_file), "tiny", name)
    return msgspec.structs.replace(own, **values)


@contextlib.contextmanager
def children(*all_terms: GuestTerms) -> Iterator[list[GuestChild]]:
    found = [GuestChild(one) for one in all_terms]
    try:
        yield found
    finally:
        for child in found:
            child.kill()


def test_a_guest_that_dies_in_mid_chain_is_bridged(pool: LocalPool, tiny_model: Path) -> None:
    before = len(orders(pool))
    both = [terms(pool, f"chained{number}") for number in range(2)]
    with children(*both) as guests:
        wait_until(lambda: len(orders(pool)) == before + 2, "both are ordered to load")
        first = next(ref for ref, source in feeders(pool, last=2).items() if not source.is_agent)
        (name,) = [host for ref, host in joined(pool).items() if ref == first]
        dying, other = guests if name == "chained0" else guests[::-1]
        dying.kill()
        assert content_of_child(other) == right(tiny_model)


def test_one_that_keeps_nothing_leaves_when_all_is_taken(pool: LocalPool, tiny_model: Path) -> None:
    with children(terms(pool, "hasty")) as (hasty,):
        assert content_of_child(hasty) == right(tiny_model)
        assert content_of_child(hasty) == right(tiny_model), "it may be read again"
        hasty.leave()
        assert hasty.wait(patient(30)) == 0
    wait_until(lambda: pool.gauge("agents") == 0, "it has left")


def test_the_reason_comes_to_who_wants_the_layers(pool: LocalPool, tmp_path: Path) -> None:
    stranger = terms(pool, "lost", token_file=str(tmp_path / "none"))
    with children(terms(pool, "astray", model="giant"), stranger) as (astray, lost):
        with pytest.raises(UserError, match="the pool has no model 'giant'"):
            content_of_child(astray)
        with pytest.raises(UserError, match="No such file or directory"):
            content_of_child(lost)


def test_the_only_source_dies_and_the_model_comes_all_the_same(
    pool: LocalPool, tiny_model: Path
) -> None:
    """From the next life of the worker, or from the files."""
    before = len(orders(pool))
    with children(terms(pool, "patient")) as (patient,):
        wait_until(lambda: len(orders(pool)) > before, "it is ordered to load")
        pool.kill("worker 0")
        assert content_of_child(patient) == right(tiny_model)
    wait_until(lambda: pool.serving() == 1, "the worker is back")


def test_bytes_that_are_not_those_of_the_manifest_never_reach_anybody(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A file is overwritten after the model was published, and guests read the files."""
    model = tmp_path / "tiny"
    shutil.copytree(tiny_model, model)
    with LocalPool(
        model,
        tmp_path,
        "    min_replicas: 0\n    max_replicas: 1\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=1,
        listen="127.0.0.1:0",
        host_memory_bytes=0,
        downlink_bytes_per_s=100_000_000,
    ) as pool:
        for file in model.glob("*.safetensors"):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        # Time enough for a load that fails.
        patience_s = float(patient_ms(2000) // 1000)
        wanted = terms(pool, "reader", same_files=True, patience_s=patience_s)
        with children(wanted) as (reader,), pytest.raises(UserError) as refused:
            content_of_child(reader)
        words = f"did not come within {patience_s:g} s (the last load failed: "
        assert words in str(refused.value)
