"""Keys are read again when their files change, and a gateway serves by them from then on."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.gateway.contract.keys import KeyDigests, digest_of
from livescale.runtime.children.pool_process import Child
from livescale.runtime.supervisor.key_watch import KeyWatch
from livescale.runtime.wire.boot import GatewayBoot
from livescale.runtime.wire.protocol import Address, Catalog
from slowness import patient

WAIT_S = 60.0
keys = st.lists(st.sampled_from(["key-a", "key-b", "key-c", "key-d"]), min_size=1, max_size=3)


def watch(path: Path | None, admin: Path | None = None, **environ: str) -> KeyWatch:
    files = {"api_key_file": path, "admin_key_file": admin}
    given = {name: str(file) for name, file in files.items() if file is not None}
    return KeyWatch(PoolConfig(**given), environ)


def edit(path: Path, text: str) -> None:
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    os.replace(new, path)


def replace_as_old(path: Path, text: str) -> None:
    """As a copy that keeps its times, from a backup."""
    new = path.with_name("new")
    new.write_text(text)
    os.utime(new, (1e9, 1e9))
    os.replace(new, path)


def edit_and_pretend(path: Path, text: str) -> None:
    """The time of the last change says nothing."""
    path.write_text(text)
    os.utime(path, (1e9, 1e9))


def remove(path: Path, _: str) -> None:
    path.unlink(missing_ok=True)


def spoil(path: Path, text: str) -> None:
    path.write_bytes(b"\xff" + text.encode())


def empty(path: Path, _: str) -> None:
    path.write_text("# none\n")


CHANGES = [edit, replace, replace_as_old, edit_and_pretend, remove, spoil, empty]
BROKEN = (remove, spoil, empty)


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(story=st.lists(st.tuples(st.sampled_from(CHANGES), keys), max_size=8))
def test_the_last_whole_file_counts(
    story: list[tuple[Callable[[Path, str], None], list[str]]], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("key-a\n")
    watched = watch(path, LIVESCALE_API_KEY="key-e")
    expected = ["key-a"]
    for change, lines in story:
        change(path, "\n".join(lines))
        expected = expected if change in BROKEN else lines
        before = watched.digests
        is_changed = watched.look()
        assert set(watched.digests.api) == {digest_of(key) for key in ["key-e", *expected]}
        assert is_changed == (watched.digests != before)
        assert not watched.look()
    assert watched.digests.admin == ()


def test_another_weight_of_a_key_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("key-a weight=2\nkey-b weight=1\n")
    watched = watch(path)
    assert watched.digests.weights == {digest_of("key-a"): 2}
    edit(path, "key-a weight=3\nkey-b\n")
    assert watched.look()
    assert watched.digests.weights == {digest_of("key-a"): 3}


def test_what_is_broken_is_told_once_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "admins"
    path.write_text("secret-1\n")
    watched = watch(None, path)
    assert watched.digests == KeyDigests((), (digest_of("secret-1"),))
    for change, says in [(remove, "No such file"), (spoil, "UTF-8"), (edit, "admins: 1 keys")]:
        change(path, "secret-2")
        for _ in range(5):
            watched.look()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert f"admin_key_file {path}" in lines[0]
        assert says in lines[0]
        assert "secret" not in lines[0]
        caplog.clear()
    assert watched.digests.admin == (digest_of("secret-2"),)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As of `--api-key-file <(…)`: there is nothing to read again."""
    reader, writer = os.pipe()
    os.write(writer, b"key-a\n")
    os.close(writer)
    watched = watch(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert watched.digests.api == (digest_of("key-a"),)
    assert not watched.has_files
    assert not watched.look()


def test_a_missing_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="admin_key_file /nowhere"):
        watch(None, Path("/nowhere"))
    with pytest.raises(ConfigError, match="LIVESCALE_ADMIN_KEY"):
        watch(None, None, LIVESCALE_ADMIN_KEY="")


@pytest.mark.usefixtures("machine")
def test_a_gateway_serves_by_the_keys_that_it_was_told_last() -> None:
    """Also by those that it was told before it could heed them."""
    asyncio.run(asyncio.wait_for(gateway_story(), patient(WAIT_S)))


async def gateway_story() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        boot = GatewayBoot(
            secret="secret",
            gateway="g0",
            listen_fd=listener.fileno(),
            controller=Address("127.0.0.1", 1),
            catalog=Catalog(()),
            pool=PoolConfig(queue_requests_max=1, drain_timeout_s=1, slo="ttft=1s"),
            key_digests=(digest_of("key-a"),),
        )
        child = Child("gateway", "gateway", lambda _: boot, (listener.fileno(),))
        await child.start(PoolConfig())
        child.tell(KeyDigests((digest_of("key-b"),), (digest_of("key-c"),)))
        watching = asyncio.ensure_future(child.watch())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(
                base_url=url, timeout=patient(WAIT_S), trust_env=False
            ) as client:
                assert await statuses(client, "key-b") == (200, 401)
                assert await statuses(client, "key-a") == (401, 401)
                assert await statuses(client, "key-c") == (401, 200)
                child.tell(KeyDigests((digest_of("key-d"),), (digest_of("key-c"),)))
                deadline_s = time.monotonic() + patient(WAIT_S) / 2
                while await statuses(client, "key-d") != (200, 401):
                    assert time.monotonic() < deadline_s
                assert await statuses(client, "key-b") == (401, 401)
        finally:
            child.signal(9)
            await watching


async def statuses(client: httpx.AsyncClient, key: str) -> tuple[int, int]:
    """Of a request to /v1 and of one to /admin."""
    headers = {"Authorization": f"Bearer {key}"}
    first, second = [
        (await client.get(path, headers=headers)).status_code
        for path in ("/v1/models", "/admin/models")
    ]
    return first, second
