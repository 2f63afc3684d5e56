"""API keys: who gets in, what stays open, and that no key is ever written down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from gateway_double import WAIT_S, LocalServer, ScriptedBackend, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.common.settings import ConfigError
from livescale.gateway.contract.keys import digest_of, read_key_weights

pytestmark = pytest.mark.usefixtures("machine")

KEYS = ("sk-first", "sk-second-1234567890")
BODY = {"model": "tiny", "prompt": "x"}
sendable = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def guarded(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with running(shared_backend, key_digests=[digest_of(key) for key in KEYS]) as server:
        yield server


@pytest.fixture
def client(guarded: LocalServer, backend: ScriptedBackend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_known_key_gets_in(key: str, scheme: str, client: httpx.Client) -> None:
    headers = {"Authorization": f"{scheme} {key}"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Basic sk-first", "sk-first", "Bearer sk-firs", "Bearer é"],
)
def test_others_do_not(
    authorization: str | None, client: httpx.Client, backend: ScriptedBackend
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    headers["X-Request-Id"] = b"mine"  # type: ignore[assignment]
    for response in (
        client.post("/v1/completions", json=BODY, headers=headers),  # type: ignore[arg-type]
        client.get("/v1/models", headers=headers),  # type: ignore[arg-type]
        client.get("/v1/nowhere", headers=headers),  # type: ignore[arg-type]
    ):
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"] == "mine"
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "invalid_api_key"
    assert not backend.streams
    assert not backend.admitted


@given(key=sendable)
@settings(
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_only_the_keys_themselves_are_keys(key: str, client: httpx.Client) -> None:
    answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == (200 if key in KEYS else 401)


def test_monitoring_stays_open(client: httpx.Client) -> None:
    for path in ("/health", "/live", "/ping", "/version", "/metrics"):
        assert client.get(path).status_code == 200


def test_the_official_client(guarded: LocalServer, backend: ScriptedBackend) -> None:
    url = f"{guarded.url}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as known:
        assert known.completions.create(**BODY).choices  # type: ignore[call-overload]
    with (
        openai.OpenAI(base_url=url, api_key="sk-other", max_retries=0) as unknown,
        pytest.raises(openai.AuthenticationError),
    ):
        unknown.models.list()


# -- where keys come from -------------------------------------------------------------------------


@given(keys=st.lists(sendable.filter(lambda key: not key.startswith("#")), min_size=1, max_size=5))
def test_keys_of_a_file(tmp_path_factory: pytest.TempPathFactory, keys: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "keys"
    path.write_text("# ours\n\n" + "".join(f"  {key}\n" for key in keys))
    digests = read_key_weights(str(path), {})
    assert digests == {digest_of(key): 1 for key in keys}
    assert not any(key in digest for key in keys if len(key) > 3 for digest in digests)


@given(weights=st.dictionaries(sendable, st.none() | st.integers(1, 100), min_size=1, max_size=5))
def test_weights_of_a_file(
    tmp_path_factory: pytest.TempPathFactory, weights: dict[str, int | None]
) -> None:
    keys = {key: weight for key, weight in weights.items() if not key.startswith("#")}
    path = tmp_path_factory.getbasetemp() / "weights"
    lines = [key if n is None else f"{key} \t weight={n} " for key, n in keys.items()]
    path.write_text("\n".join([*lines, "last"]))
    expected = {digest_of(key): n or 1 for key, n in {"last": None, **keys}.items()}
    assert read_key_weights(str(path), {}) == expected
    # Administrators take no turns.
    if any(keys.values()):
        with pytest.raises(ConfigError, match="without spaces"):
            read_key_weights(str(path), {}, has_weights=False)


def test_keys_of_the_environment_join_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    environ = {"LIVESCALE_API_KEY": "c", "VLLM_API_KEY": "a", "OTHER_KEY": "d"}
    known = set(read_key_weights(str(tmp_path / "keys"), environ))
    assert known == {digest_of(key) for key in "abc"}
    assert read_key_weights(None, {}) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        (b"", "has no key"),
        (b"# only words\n", "has no key"),
        (b"secret-1\nsecret 2\n", "line 2"),
        (b"secret-1 weight=3 secret\n", "line 1"),
        *(
            (b"secret-1 weight=%b\n" % weight, "line 1.* from 1 to 100")
            for weight in (b"", b"0", b"101", b"-1", b"1.5", b"9" * 5000, "\u00b2".encode())
        ),
        (b"secret-1 weight=2\nsecret-1 weight=3\n", "two weights, 2 and 3"),
        (b"secret-\xc3\xa9\n", "line 1"),
        (b"secret-\xff\n", "UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_its_keys(
    text: bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=says) as raised:
        read_key_weights(str(path), {})
    assert str(path) in str(raised.value)
    assert "secret" not in str(raised.value)


def test_an_empty_variable_is_no_open_door() -> None:
    with pytest.raises(ConfigError, match="LIVESCALE_API_KEY"):
        read_key_weights(None, {"LIVESCALE_API_KEY": ""})
