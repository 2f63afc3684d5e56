"""A pool with certificates, as people run it: `serve` and `join` with `--tls-dir`. (The rows of the
table in docs/security.md that are about joining, and about what is written down.)"""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from certificates import Cluster, token_of
from joiners import Joiner, closing
from pool_thread import LocalPool, wait_until
from running_streams import check, nothing, right_tokens_of, streams_while

from livescale.runtime.wire.token import JoinToken, make_token
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
POLICY = "    min_replicas: 1\n    prefill_tokens_per_s: 5000\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster") / "pool")


@pytest.fixture(scope="module")
def head(
    tiny_model: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalPool]:
    """A head with certificates, and without devices."""
    scratch = tmp_path_factory.mktemp("head")
    with LocalPool(
        tiny_model,
        scratch,
        POLICY,
        **cluster.head_settings(scratch),
        record_members=str(scratch / "members"),
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def alice(
    head: LocalPool, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Joiner]:
    """A host with two workers that stays."""
    scratch = tmp_path_factory.mktemp("alice")
    # As on a machine that does not share the cluster's folder.
    own = shutil.copytree(cluster.member_dir("alice"), scratch / "tls")
    joiner = Joiner(head, "alice", scratch, "--workers", "2", "--tls-dir", str(own))
    with closing(joiner):
        head.wait_ready()
        yield joiner


def tls_flags(cluster: Cluster, name: str) -> tuple[str, str]:
    return "--tls-dir", str(cluster.member_dir(name))


def refusal(joiner: Joiner) -> str:
    with closing(joiner):
        assert joiner.ended() == 2
    return joiner.log.read_text().strip().splitlines()[-1]


# -- who may join -----------------------------------------------------------------------------


def test_a_pool_with_certificates_serves_on_another_host(head: LocalPool, alice: Joiner) -> None:
    check(asyncio.run(streams_while(head, nothing)), right_tokens_of(head))
    assert head.call(head.pool.examine(), 60)


def test_no_token(head: LocalPool, cluster: Cluster, tmp_path: Path) -> None:
    nowhere = tmp_path / "no.token"
    flags = tls_flags(cluster, "bob")
    said = refusal(Joiner(head, "bob", tmp_path, *flags, token_file=nowhere))
    assert f"token_file {nowhere}: No such file" in said


def test_an_old_token(head: LocalPool, cluster: Cluster, tmp_path: Path) -> None:
    """That of a pool with the same certificates, whose secret was another one."""
    old = tmp_path / "old.token"
    make_token(old, cluster.head().fingerprint)
    said = refusal(Joiner(head, "bob", tmp_path, *tls_flags(cluster, "bob"), token_file=old))
    assert "has a wrong token" in said


def test_a_token_without_certificates_where_the_pool_has_some(
    head: LocalPool, cluster: Cluster, tmp_path: Path
) -> None:
    """Neither side can be made to do without."""
    said = refusal(Joiner(head, "bob", tmp_path))
    assert "is of a pool with certificates. Give tls_dir" in said
    plain = tmp_path / "plain.token"
    plain.write_bytes(msgspec.json.encode(JoinToken(token_of(head).secret)))
    plain.chmod(0o600)
    said = refusal(Joiner(head, "bob", tmp_path, *tls_flags(cluster, "bob"), token_file=plain))
    assert "is of a pool without certificates" in said
    said = refusal(Joiner(head, "bob", tmp_path, "--patience-s", "0.2", token_file=plain))
    assert "is not the controller" in said


def test_a_strange_certificate(head: LocalPool, tmp_path: Path) -> None:
    strange = Cluster(tmp_path / "strange")
    said = refusal(Joiner(head, "bob", tmp_path, "--tls-dir", str(strange.head_dir)))
    assert "another certificate authority than tls_dir" in said
    forged = tmp_path / "forged.token"
    token = msgspec.structs.replace(token_of(head), fingerprint=strange.head().fingerprint)
    forged.write_bytes(msgspec.json.encode(token))
    forged.chmod(0o600)
    flags = ("--tls-dir", str(strange.head_dir))
    said = refusal(Joiner(head, "bob", tmp_path, *flags, token_file=forged))
    assert "certificate" in said


def test_a_member_that_was_revoked(head: LocalPool, cluster: Cluster, tmp_path: Path) -> None:
    flags = tls_flags(cluster, "mallory")
    cluster.folder.revoke("mallory")
    (cluster.path / "mallory" / "cert.revoked").rename(cluster.path / "mallory" / "cert.pem")
    said = refusal(Joiner(head, "mallory", tmp_path, *flags))
    assert "the certificate of this machine was revoked" in said


def test_a_member_that_is_revoked_while_it_serves(
    head: LocalPool, cluster: Cluster, alice: Joiner, tmp_path: Path
) -> None:
    """Its workers are cut off, streams go on elsewhere, and its processes end; other hosts learn
    whose certificate counts no more."""
    right = right_tokens_of(head)
    # A second try needs another certificate.
    name = f"victim-{tmp_path.name[-1]}"
    victim = Joiner(head, name, tmp_path, "--workers", "1", *tls_flags(cluster, name))
    with closing(victim):
        wait_until(lambda: head.gauge("workers") == 3, "it has joined")

        async def revoke() -> None:
            cluster.folder.revoke(name)

        check(asyncio.run(streams_while(head, revoke)), right)
        wait_until(lambda: head.gauge("workers") == 2, "its worker is cut off")
        assert victim.ended() == 2
    assert victim.said("the certificate of this machine was revoked")
    known = (cluster.path / "revoked.pem").read_bytes()
    own = alice.log.parent / "tls" / "revoked.pem"
    wait_until(lambda: own.read_bytes() == known, "the other host has the list")


# -- what is written down ---------------------------------------------------------------------


def test_nothing_secret_is_shown(head: LocalPool, alice: Joiner, cluster: Cluster) -> None:
    """In logs, records, command lines, environments."""
    check(asyncio.run(streams_while(head, nothing)), right_tokens_of(head))
    secrets = [token_of(head).secret.encode()]
    for key in cluster.path.rglob("*key*"):
        secrets += [line for line in key.read_bytes().splitlines() if b"-----" not in line]
    shown = [alice.log.read_bytes()]
    scratch = head.record.parent
    shown += [
        path.read_bytes() for path in scratch.rglob("*") if path.is_file() and not is_token(path)
    ]
    pids = [*head.pool.pids().values(), alice.process.pid]
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            shown.append(" ".join(process.cmdline()).encode())
            shown.append(str(process.environ()).encode())
    assert len(secrets) > 4
    for secret in secrets:
        assert not any(secret in text for text in shown)


def is_token(path: Path) -> bool:
    return path.name == "token"


def test_files_of_a_cluster_are_their_owners_alone(cluster: Cluster) -> None:
    cluster.member_dir("carol")
    for key in cluster.path.rglob("*key*"):
        assert key.stat().st_mode & 0o777 == 0o600
    assert cluster.path.stat().st_mode & 0o777 == 0o700


# -- HTTPS ------------------------------------------------------------------------------------


def test_the_api_over_https(tiny_model: Path, cluster: Cluster, tmp_path: Path) -> None:
    files = {
        "gateways": 2,
        "ssl_certfile": str(cluster.head_dir / "cert.pem"),
        "ssl_keyfile": str(cluster.head_dir / "key.pem"),
    }
    with LocalPool(tiny_model, tmp_path, POLICY, device="timed", workers=1, **files) as pool:
        assert pool.url.startswith("https://")
        context = ssl.create_default_context(cafile=cluster.head_dir / "ca.pem")
        context.check_hostname = False
        asked = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        answer = httpx.post(
            f"{pool.url}/v1/completions", json=asked, verify=context, timeout=patient(30)
        )
        assert answer.status_code == 200
        assert re.search(r"data: \[DONE\]", answer.text)
        with pytest.raises(httpx.HTTPError):
            httpx.get(pool.url.replace("https", "http") + "/health", timeout=patient(10))
