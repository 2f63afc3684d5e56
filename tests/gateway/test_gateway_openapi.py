"""The OpenAPI document against the gateway itself: whatever it allows is answered as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from gateway_double import WAIT_S, LocalServer, ScriptedBackend, running
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation import GenerationMode

from effort import examples
from livescale.gateway.contract.keys import digest_of

pytestmark = pytest.mark.usefixtures("machine")

KEY = "a-key"
METHODS = {"get", "post", "patch", "delete"}
bounded = settings(
    max_examples=examples(24),
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    """With keys, so that the check of authorization has something to do."""
    backend = ScriptedBackend(shared_backend.models(), [5, 6])
    digests = [digest_of(KEY)]
    with running(backend, key_digests=digests, admin_key_digests=digests) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: LocalServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/openapi.json", timeout=WAIT_S)
    assert answer.status_code == 200
    return answer.json()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_as_described(
    mode: GenerationMode, document: dict[str, Any], server: LocalServer
) -> None:
    """Bodies that the types allow and bodies that they do not. (What depends on the model, such as
    its name and its vocabulary, no type can tell: a 400 for that is right, too.)"""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    # A body above the bound is refused for its size before anything else is looked at.
    schema.config.checks.negative_data_rejection.expected_statuses += ["413"]
    with requests.Session() as session:
        session.trust_env = False
        for found in schema.get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # nothing can be wrong with it

            @given(case=operation.as_strategy(mode))
            @bounded
            def check(case: schemathesis.Case) -> None:
                case.call_and_validate(
                    session=session,
                    headers={"Authorization": f"Bearer {KEY}"},
                    excluded_checks=[positive_data_acceptance],
                    timeout=WAIT_S,
                )

            check()


def test_every_route_is_described(server: LocalServer, document: dict[str, Any]) -> None:
    """What the document does not name is not there."""
    described = {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    assert ("post", "/v1/completions") in described
    for path, methods in document["paths"].items():
        url = server.url + path.replace("{model}", "nope")
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.request("TRACE", url, headers=headers, timeout=WAIT_S)
        allowed = {word.strip().lower() for word in answer.headers["allow"].split(",")}
        assert answer.status_code == 405
        assert allowed & METHODS == set(methods)


@pytest.mark.parametrize("has_keys", [False, True])
def test_keys_are_described_where_there_are_any(
    has_keys: bool, shared_backend: ScriptedBackend
) -> None:
    digests = [digest_of(KEY)] if has_keys else []
    backend = ScriptedBackend(shared_backend.models(), [])
    with running(backend, key_digests=digests, admin_key_digests=digests) as server:
        paths = httpx.get(f"{server.url}/openapi.json", timeout=WAIT_S).json()["paths"]
    guarded = {
        path for path, methods in paths.items() if "security" in next(iter(methods.values()))
    }
    expected = {path for path in paths if path.startswith(("/v1", "/admin"))}
    assert guarded == (expected | {"/tokenize", "/detokenize"} if has_keys else set())
