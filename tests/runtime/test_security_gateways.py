"""Gateways of a pool with certificates, on machines of their own. (The rows of the table in
docs/security.md that are about gateways.)"""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from certificates import Cluster, lost_after_ms, token_of
from joiners import JoinedGateway, Joiner, Machine, closing
from pool_thread import LocalPool, wait_until
from running_streams import STREAMS, are_given_up, check, nothing, right_tokens_of, streams_while
from test_security_wires import Tap, door
from test_security_wires import closing as closing_tap

from livescale import __version__
from livescale.clusters.topology import Device
from livescale.common.addresses import address_text, parse_address
from livescale.common.credentials import Credentials
from livescale.messages.attempts import Cancel, Disown
from livescale.messages.commands import Dispatch, ReleaseHolding
from livescale.messages.epochs import Acting, Fenced
from livescale.messages.events import (
    HoldingCompleted,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    WorkerJoined,
)
from livescale.runtime.wire.doors import CONTROLLER_DOOR, token_door
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.joining import Farewell, GatewayJoins, HostHello
from livescale.runtime.wire.protocol import (
    Address,
    Examined,
    FromTokenServer,
    GatewayHello,
    Holder,
    MemberHello,
    Order,
    Peer,
    Peers,
    Refused,
    ToGateway,
    ToHost,
)
from livescale.runtime.wire.token import JoinToken
from livescale.runtime.wire.wire_channel import Wire, open_wire
from livescale.values.types import SEQUENCES_MAX, HoldingId, Outcome, WorkerRef
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster") / "pool")


@pytest.fixture(scope="module")
def head(
    tiny_model: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalPool]:
    """A head with certificates and without devices, and a host with two workers."""
    scratch = tmp_path_factory.mktemp("head")
    with LocalPool(
        tiny_model,
        scratch,
        "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n",
        **cluster.head_settings(scratch),
    ) as pool:
        flags = ("--workers", "2", "--tls-dir", str(cluster.member_dir("alice")))
        alice = Joiner(pool, "alice", scratch, *flags)
        with closing(alice):
            pool.wait_ready()
            yield pool


def tls_flags(cluster: Cluster, name: str) -> tuple[str, str]:
    return "--tls-dir", str(cluster.gateway_dir(name))


def trusting(cluster: Cluster) -> ssl.SSLContext:
    """A client of the API that knows the authority; names are not what is looked at here."""
    context = ssl.create_default_context(cafile=cluster.head_dir / "ca.pem")
    context.check_hostname = False
    return context


# -- TLS on all of its wires ------------------------------------------------------------------


def test_its_answers_come_over_https_and_its_wires_say_nothing_in_plain_text(
    head: LocalPool, cluster: Cluster, tmp_path: Path
) -> None:
    """Workers take no wire without TLS; what goes to the head is looked at on its way."""
    right = right_tokens_of(head)
    own = cluster.gateway_dir("web")
    https = ("--ssl-certfile", str(own / "cert.pem"), "--ssl-keyfile", str(own / "key.pem"))
    listens = Address(*parse_address(head.pool.join_address, "head"))
    with closing_tap(Tap(listens)) as tap:
        through = ("--join", address_text(tap.address.host, tap.address.port))
        web = JoinedGateway(head, "web", tmp_path, *https, *tls_flags(cluster, "web"), *through)
        with closing(web):
            assert web.url.startswith("https://")
            context = trusting(cluster)
            check(asyncio.run(streams_while(head, nothing, [web.url], context)), right)
            body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 4, "temperature": 0}
            url = f"{web.url}/v1/completions"
            answer = httpx.post(url, json=body, verify=context, timeout=patient(60))
            assert answer.status_code == 200, "its tokenizer has come over the wire"
            with pytest.raises(httpx.ConnectError, match="certificate"):
                httpx.get(f"{web.url}/live", timeout=patient(60))
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{web.url.replace('https', 'http')}/live", timeout=patient(60))
            web.interrupt()
            assert web.ended() == 0
        secret = token_of(head).secret
        for kept in (tap.sent, tap.answered):
            assert kept
            for word in (b"LSw2", b"GatewayJoins", b"tiny", secret.encode()):
                assert word not in kept


def test_only_a_head_is_the_head_of_a_gateway(
    head: LocalPool, cluster: Cluster, tmp_path: Path
) -> None:
    """Another member that has the pool's secret, and listens."""

    async def story() -> tuple[int, Machine]:
        async with door(cluster.member("mallory"), secret=token_of(head).secret) as address:
            flags = ("--join", address_text(address.host, address.port), "--patience-s", "0.2")
            web = JoinedGateway(head, "web", tmp_path, *tls_flags(cluster, "web"), *flags)
            with closing(web):
                return await asyncio.to_thread(web.ended), web

    status, web = asyncio.run(story())
    assert status == 2
    assert web.said("the certificate of CN=mallory is not a head node's")


# -- who may be a gateway ---------------------------------------------------------------------


def refusal(machine: Machine) -> str:
    with closing(machine):
        assert machine.ended() == 2
    return machine.log.read_text().strip().splitlines()[-1]


def written(token: JoinToken, path: Path) -> tuple[str, str]:
    path.write_bytes(msgspec.json.encode(token))
    path.chmod(0o600)
    return "--token-file", str(path)


def test_a_gateway_without_the_token(head: LocalPool, cluster: Cluster, tmp_path: Path) -> None:
    """None, that of another pool, and that of this pool when it had another secret."""
    own = tls_flags(cluster, "web")
    nowhere = ("--token-file", str(tmp_path / "no.token"))
    said = refusal(JoinedGateway(head, "web", tmp_path, *own, *nowhere))
    assert "no.token: No such file" in said
    other = written(JoinToken("0" * 32), tmp_path / "other")
    assert "is of a pool without certificates" in refusal(
        JoinedGateway(head, "web", tmp_path, *own, *other)
    )
    old = written(JoinToken("0" * 32, cluster.head().fingerprint), tmp_path / "old")
    said = refusal(JoinedGateway(head, "web", tmp_path, *own, *old))
    assert "has a wrong token" in said


def test_a_gateway_that_talks_in_plain_text(head: LocalPool, tmp_path: Path) -> None:
    """It knows the secret."""
    said = refusal(JoinedGateway(head, "web", tmp_path))
    assert "is of a pool with certificates. Give tls_dir" in said
    plain = written(JoinToken(token_of(head).secret), tmp_path / "plain")
    said = refusal(JoinedGateway(head, "web", tmp_path, *plain, "--patience-s", "0.2"))
    assert "is not the controller" in said


def test_a_gateway_with_a_strange_certificate(head: LocalPool, tmp_path: Path) -> None:
    strange = Cluster(tmp_path / "strange")
    own = tls_flags(strange, "web")
    said = refusal(JoinedGateway(head, "web", tmp_path, *own))
    assert "another certificate authority than tls_dir" in said
    token = JoinToken(token_of(head).secret, strange.head().fingerprint)
    forged = written(token, tmp_path / "forged")
    said = refusal(JoinedGateway(head, "web", tmp_path, *own, *forged))
    assert "certificate" in said


def test_a_gateway_that_was_revoked(head: LocalPool, cluster: Cluster, tmp_path: Path) -> None:
    flags = tls_flags(cluster, "rob")
    cluster.folder.revoke("rob")
    (cluster.path / "rob" / "cert.revoked").rename(cluster.path / "rob" / "cert.pem")
    said = refusal(JoinedGateway(head, "rob", tmp_path, *flags))
    assert "the certificate of this machine was revoked" in said


@pytest.mark.long
def test_a_gateway_that_is_revoked_while_it_serves(
    head: LocalPool, cluster: Cluster, tmp_path: Path
) -> None:
    """Its streams end with its process, workers are free of them, and others do not notice."""
    right = right_tokens_of(head)
    # As on a machine that does not share the cluster's folder.
    own = shutil.copytree(cluster.gateway_dir("sue"), tmp_path / "tls")
    sue = JoinedGateway(head, "sue", tmp_path, "--tls-dir", str(own))
    with closing(sue):

        async def revoke() -> None:
            assert head.kv_in_use() > 0
            cluster.folder.revoke("sue")

        answers = asyncio.run(streams_while(head, revoke, [head.url, sue.url]))
        assert sue.ended() == 2
    assert sue.said("the certificate of this machine was revoked")
    for answer in answers[::2]:
        assert answer.error is None
        assert answer.token_ids == right[tuple(answer.prompt_ids)]
    for answer in answers[1::2]:
        assert answer.error is not None
        assert answer.token_ids == right[tuple(answer.prompt_ids)][: len(answer.token_ids)]
    ended = answers[1::2]
    wait_until(lambda: are_given_up(head.record, ended), "workers have given the lost ones up")
    wait_until(lambda: head.kv_in_use() == 0, "and have room for others")


# -- what a gateway may not -------------------------------------------------------------------


def test_a_gateway_s_certificate_makes_no_host(
    head: LocalPool, cluster: Cluster, tmp_path: Path
) -> None:
    said = refusal(Joiner(head, "web", tmp_path, *tls_flags(cluster, "web")))
    assert "The certificate of this machine is for a gateway" in said
    assert head.gauge("workers") == 2


class Rogue:
    """A program with the pool's secret and a gateway's certificate, which talks to the pool's doors
    as it likes."""

    def __init__(self, head: LocalPool, cluster: Cluster) -> None:
        self._secret = token_of(head).secret
        self._address = Address(*parse_address(head.pool.join_address, "head"))
        self._tls = Credentials(cluster.gateway_dir("rogue"))

    async def controller(self) -> Wire[Any]:
        """It says first which life it is."""
        wire: Wire[Any] = await self._enter(self._address, CONTROLLER_DOOR)
        acting = await wire.receive()
        assert isinstance(acting, Acting)
        self.epoch = acting.epoch
        return wire

    async def workers(self) -> tuple[Peer, ...]:
        """Those that gateways are told of."""
        wire = await self.controller()
        wire.send(GatewayHello("rogue"))
        while not isinstance(message := await wire.receive(), Peers):
            assert message is not None
        wire.close()
        assert len(message.peers) == 2
        return message.peers

    async def worker(self, peer: Peer, *words: object) -> list[object]:
        """Say this to the worker; what it answered before it ended the wire."""
        wire = await self._enter(peer.token_address, token_door(peer.worker))
        return await self._said(wire, words)

    async def said(self, *words: object) -> list[object]:
        """The same with the controller."""
        return await self._said(await self.controller(), words)

    async def _said(self, wire: Wire[Any], words: Sequence[Any]) -> list[object]:
        for word in words:
            wire.send(word)
        came: list[object] = []
        # It works, as far as can be seen: only for what it said is it cut off.
        heartbeats = Heartbeats(lost_after_ms())
        heartbeats.add(wire)
        beating = asyncio.create_task(heartbeats.run())
        try:
            async with asyncio.timeout(patient(60)):
                async for message in wire:
                    came.append(message)
        finally:
            beating.cancel()
        return came

    async def _enter(self, address: Address, door: str) -> Wire[Any]:
        kinds = ToGateway | ToHost | FromTokenServer
        return await open_wire(address, kinds, secret=self._secret, door=door, tls=self._tls)


async def own_requests(head: LocalPool) -> tuple[str, list[str]]:
    """What the head's own gateway is called, and some of its streams, which came last."""
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}
    async with httpx.AsyncClient(timeout=patient(60)) as client:
        answer = (await client.post(f"{head.url}/v1/completions", json=body)).json()
    _, name, number = answer["id"].split("-")
    return name, [f"{name}-{int(number) - back}" for back in range(1, STREAMS, 4)]


WORKER = WorkerRef(0)
HOLDING = HoldingId(WORKER, 1)
# The first message of a connection.
HELLOS: dict[str, Any] = {
    "nonsense": "nonsense",
    "an order": Order(ReleaseHolding(HOLDING)),
    "a worker's hello": MemberHello(
        WorkerJoined(WorkerRef(9), Device("cpu", "h", "leaf", 1 << 20, 1 << 20)),
        Holder(WorkerRef(9), Address("127.0.0.1", 1), "h"),
    ),
    "a host's hello": HostHello("0", "h", 1, 0),
    "news without a hello": HoldingCompleted(HOLDING, 0),
}
# What follows a gateway's hello.
NEWS: dict[str, Any] = {
    "nonsense": {"type": "nonsense"},
    "a worker's hello": HELLOS["a worker's hello"],
    "a host's hello": HELLOS["a host's hello"],
    "a host's farewell": Farewell(1),
    "a worker's news": HoldingCompleted(HOLDING, 0),
    "a controller's word": Peers(()),
    "what a member holds": Examined("call", WORKER, ()),
}


def test_what_a_gateway_may_not_say_ends_its_wire_and_nothing_else(
    head: LocalPool, cluster: Cluster
) -> None:
    """To the controller, while the head's own gateway has streams."""
    right = right_tokens_of(head)
    rogue = Rogue(head, cluster)

    async def misbehave() -> None:
        own, others = await own_requests(head)
        for name, message in HELLOS.items():
            answers = await rogue.said(message)
            assert all(isinstance(one, Refused) for one in answers), name
        assert await rogue.said(GatewayHello(own)) == [], "there is one of that name"
        for hello in (GatewayHello("rogue"), GatewayJoins(__version__, "rogue", "start")):
            for message in NEWS.values():
                await rogue.said(hello, message)
        for other in others:
            for event in (
                RequestCancelled(other),
                RequestEnded(other, 0, Outcome.FINISHED),
                RequestArrived(other, "tiny", 1, 1),
            ):
                await rogue.said(GatewayHello("rogue"), event)

    check(asyncio.run(streams_while(head, misbehave)), right)
    check(asyncio.run(streams_while(head, nothing)), right)
    assert head.gauge("workers") == 2


@pytest.mark.long
def test_a_gateway_meddles_with_no_other_ones_requests_at_workers(
    head: LocalPool, cluster: Cluster
) -> None:
    right = right_tokens_of(head)
    rogue = Rogue(head, cluster)

    async def meddle() -> None:
        own, others = await own_requests(head)
        for peer in await rogue.workers():
            assert await rogue.worker(peer, GatewayHello(own)) == [], "there is one of that name"
            for message in ("nonsense", Order(ReleaseHolding(HOLDING)), GatewayHello("rogue")):
                await rogue.worker(peer, GatewayHello("rogue"), message)
            for other in others:
                for attempt in (0, 1):
                    await rogue.worker(peer, GatewayHello("rogue"), Cancel(other, attempt))
                    await rogue.worker(peer, GatewayHello("rogue"), Disown(other, attempt))

    check(asyncio.run(streams_while(head, meddle)), right)


def test_a_gateway_that_is_lost_before_it_sends_requests_on_takes_no_place(
    head: LocalPool, cluster: Cluster
) -> None:
    """The workers, which never hear of them, report no end."""
    right = right_tokens_of(head)
    rogue = Rogue(head, cluster)

    async def take_places_and_go() -> None:
        wire = await rogue.controller()
        wire.send(GatewayHello("lost"))
        for number in range(4 * SEQUENCES_MAX):
            wire.send(RequestArrived(f"lost-{number}", "tiny", 1, 1))
        dispatched = 0
        while dispatched < SEQUENCES_MAX:
            message = await wire.receive()
            assert message is not None, wire.error
            dispatched += isinstance(message, Dispatch)
        wire.break_off("lost")

    asyncio.run(take_places_and_go())
    check(asyncio.run(streams_while(head, nothing)), right)


def test_a_gateway_ends_no_controller(head: LocalPool, cluster: Cluster) -> None:
    """It tells that a later one was met, which hosts are believed."""
    rogue = Rogue(head, cluster)
    before = head.pool.pids()["controller"]

    async def tell() -> None:
        for hello in ((), (GatewayHello("rogue"),)):
            wire = await rogue.controller()
            later = msgspec.structs.replace(rogue.epoch, number=rogue.epoch.number + 7)
            for word in (*hello, Fenced(later), "nonsense"):
                wire.send(word)
            while await wire.receive() is not None:
                pass

    asyncio.run(tell())
    check(asyncio.run(streams_while(head, nothing)), right_tokens_of(head))
    assert head.pool.pids()["controller"] == before
