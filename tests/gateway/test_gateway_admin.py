"""Models that are published and withdrawn while the gateway serves, and who may do that."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_double import (
    MODEL_TOKENS_MAX,
    WAIT_S,
    LocalServer,
    Script,
    ScriptedBackend,
    running,
    sse_data,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_values import json_values

from effort import examples
from livescale.config.model import MODEL_SETTINGS
from livescale.config.slo import SloAbsolute
from livescale.gateway.contract.backend import (
    ModelCard,
    ModelPhase,
    ModelRefused,
    NewModel,
    QueueFull,
    Unavailable,
)
from livescale.gateway.contract.errors import ApiError
from livescale.gateway.contract.keys import digest_of
from livescale.gateway.endpoints.admin import CHANGING_MAX, KEY_CHARS_MAX, NAME_CHARS_MAX
from livescale.gateway.metrics.metrics import UNKNOWN_MODEL, Metrics
from livescale.gateway.requests.served import ServedModels

pytestmark = pytest.mark.usefixtures("machine")

SLO = SloAbsolute(ttft_ns=60_000_000_000, tbt_ns=None)
JSON = {"Content-Type": "application/json"}
KEY = "sk-admin"
API_KEY = "sk-of-a-client"


@pytest.fixture(scope="module")
def own_backend(model_directory: Path, text_ids: list[int]) -> ScriptedBackend:
    card = ModelCard("tiny", MODEL_TOKENS_MAX, 1_700_000_000, (1,), model_directory)
    return ScriptedBackend((card,), text_ids)


@pytest.fixture(scope="module")
def own_server(own_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with running(own_backend, slo=SLO, is_local=True) as server:
        yield server


@pytest.fixture
def pool(own_backend: ScriptedBackend, own_server: LocalServer) -> Iterator[ScriptedBackend]:
    yield own_backend
    own_backend.reset()
    offer(own_backend, own_server)


def offer(backend: ScriptedBackend, server: LocalServer, *cards: ModelCard, **others: ModelPhase):
    """In the server's loop; returns when it is done."""
    done = threading.Event()
    server.call(lambda: (backend.offer(*(cards or backend.models()), **others), done.set()))
    assert done.wait(WAIT_S)


@pytest.fixture
def admin(own_server: LocalServer, pool: ScriptedBackend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_server.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return response.json()["error"]


def served_by(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def complete(client: httpx.Client, model: str) -> int:
    return client.post("/v1/completions", json={"model": model, "prompt": "x"}).status_code


# -- publishing and withdrawing -------------------------------------------------------------------


def test_a_published_model_serves_and_a_withdrawn_one_does_not(
    admin: httpx.Client, pool: ScriptedBackend, model_directory: Path
) -> None:
    assert complete(admin, "new") == 404
    body = {"path": str(model_directory), "name": "new", "min_replicas": 0, "max_replicas": None}
    answer = admin.post("/admin/models", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["state"] == "serving"
    assert answer.json()["path"] == str(model_directory)
    settings_given = {"min_replicas": 0, "max_replicas": None}
    assert pool.added == [NewModel(str(model_directory), "new", settings_given)]
    assert served_by(admin) == ["tiny", "new"]
    assert complete(admin, "new") == 200
    assert 'model="new"' in admin.get("/metrics").text
    assert admin.post("/tokenize", json={"model": "new", "prompt": "x"}).status_code == 200
    assert error_of(admin.post("/admin/models", json=body), 409)["code"] == "model_exists"

    gone = admin.request("DELETE", "/admin/models/new", headers=JSON)
    assert gone.status_code == 202
    assert gone.json() == {"name": "new", "object": "model", "removed": True}
    assert served_by(admin) == ["tiny"]
    assert complete(admin, "new") == 404
    assert error_of(admin.get("/v1/models/new"), 404)["code"] == "model_not_found"
    assert 'model="new"' not in admin.get("/metrics").text
    error = error_of(admin.request("DELETE", "/admin/models/new", headers=JSON), 404)
    assert error["code"] == "model_not_found"


def test_the_name_is_the_directorys_if_none_is_given(
    admin: httpx.Client, model_directory: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / "a name/with parts")
    body = {"path": f"{directory}/"}
    assert admin.post("/admin/models", json=body).json()["name"] == "with parts"
    assert complete(admin, "with parts") == 200


def test_a_running_stream_of_a_withdrawn_model_ends_well(
    admin: httpx.Client, pool: ScriptedBackend, own_server: LocalServer
) -> None:
    goes_on = asyncio.Event()
    pool.script = Script(pool.script.token_ids[:3], then=goes_on)
    body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 20}
    with admin.stream("POST", "/v1/completions", json=body) as stream:
        pool.wait_for_stream().waiting.wait(WAIT_S)
        assert admin.request("DELETE", "/admin/models/tiny", headers=JSON).status_code == 202
        assert served_by(admin) == []
        assert complete(admin, "tiny") == 404
        own_server.call(goes_on.set)
        text = "".join(stream.iter_text())
    assert sse_data(text)[-1] == "[DONE]"
    assert json.loads(sse_data(text)[-2])["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        (ModelRefused("invalid", "it does not fit: 5 and 3 bytes"), 400, "invalid_model"),
        (ModelRefused("exists", ""), 409, "model_exists"),
        (ModelRefused("unknown", ""), 404, "model_not_found"),
        (ModelRefused("failed", "no host has room"), 503, "model_failed"),
        (Unavailable("the controller is being restarted"), 503, "unavailable"),
    ],
)
def test_what_the_pool_refuses_is_said(
    problem: Exception,
    status: int,
    code: str,
    admin: httpx.Client,
    pool: ScriptedBackend,
    model_directory: Path,
) -> None:
    pool.change_problem = problem
    body = {"path": str(model_directory), "name": "new"}
    for response in (
        admin.post("/admin/models", json=body),
        admin.patch("/admin/models/tiny", json={"priority": 1}),
        admin.request("DELETE", "/admin/models/tiny", headers=JSON),
    ):
        error = error_of(response, status)
        assert error["code"] == code
        if status not in (404, 409):
            assert error["message"] == str(problem)
    assert served_by(admin) == ["tiny"]


def test_a_broken_tokenizer_is_found_before_the_pool_is_asked(
    admin: httpx.Client, pool: ScriptedBackend, model_directory: Path, tmp_path: Path
) -> None:
    for number, (file, text) in enumerate(
        [("tokenizer.json", None), ("tokenizer.json", "{"), ("tokenizer_config.json", "[")]
    ):
        broken = shutil.copytree(model_directory, tmp_path / str(number))
        if text is None:
            (broken / file).unlink()
        else:
            (broken / file).write_text(text)
        error = error_of(admin.post("/admin/models", json={"path": str(broken)}), 400)
        assert error["param"] == "path"
        assert str(broken / file) in str(error["message"])
    missing = str(tmp_path / "missing")
    error = error_of(admin.post("/admin/models", json={"path": missing}), 400)
    assert missing in str(error["message"])
    assert pool.added == []


def test_a_model_that_cannot_be_served_is_withdrawn_again(
    admin: httpx.Client, pool: ScriptedBackend, model_directory: Path, tmp_path: Path
) -> None:
    pool.added_directory = tmp_path
    body = {"path": str(model_directory), "name": "new"}
    error = error_of(admin.post("/admin/models", json=body), 400)
    assert "tokenizer.json" in str(error["message"])
    assert [state.name for state in pool.model_states()] == ["tiny"]


# -- what is shown --------------------------------------------------------------------------------


def test_models_are_shown_with_their_usage(admin: httpx.Client, pool: ScriptedBackend) -> None:
    def usage() -> dict[str, float]:
        [model] = admin.get("/admin/models").json()["data"]
        assert model == admin.get("/admin/models/tiny").json()
        assert (model["name"], model["state"]) == ("tiny", "serving")
        assert (model["instances"], model["host_copies"]) == ({"serving": 1}, 1)
        return model["usage"]

    before = usage()
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 8, "ignore_eos": True}
    assert admin.post("/v1/completions", json=body).status_code == 200
    pool.script.refusal = QueueFull(1.0)
    assert admin.post("/v1/completions", json=body).status_code == 503
    after = usage()
    added = {name: after[name] - before[name] for name in before}
    assert added.pop("device_seconds") == 0
    assert after["device_seconds"] == 1.0
    assert added == {"requests": 1, "prompt_tokens": 2, "generation_tokens": 8, "slo_met": 1}


def test_models_that_come_and_go_are_shown_and_not_served(
    admin: httpx.Client, pool: ScriptedBackend, own_server: LocalServer
) -> None:
    offer(pool, own_server, coming=ModelPhase.PREPARING, going=ModelPhase.LEAVING)
    shown = {m["name"]: m["state"] for m in admin.get("/admin/models").json()["data"]}
    assert shown == {"tiny": "serving", "coming": "preparing", "going": "leaving"}
    assert served_by(admin) == ["tiny"]
    page = admin.get("/metrics").text
    assert 'model="going"' in page  # its last requests are still counted
    assert 'model="coming"' not in page


# -- who may --------------------------------------------------------------------------------------


def requests_to_admin(client: httpx.Client, **headers: str) -> list[httpx.Response]:
    headers = {"Content-Type": "application/json", **headers}
    return [
        client.get("/admin/models", headers=headers),
        client.get("/admin/models/tiny", headers=headers),
        client.post("/admin/models", content=b"{}", headers=headers),
        client.patch("/admin/models/none", content=b"{}", headers=headers),
        client.request("DELETE", "/admin/models/none", headers=headers),
    ]


def test_strangers_may_not_without_keys(http: httpx.Client) -> None:
    """The shared server does not say that it is local."""
    for response in requests_to_admin(http):
        error = error_of(response, 403)
        assert error["code"] == "admin_closed"
        assert "admin_key_file" in str(error["message"])


def test_with_admin_keys_one_is_needed(own_backend: ScriptedBackend) -> None:
    for is_local, api_keys in itertools.product((False, True), ([], [digest_of(API_KEY)])):
        keys = {"key_digests": api_keys, "admin_key_digests": [digest_of(KEY)]}
        with (
            running(own_backend, is_local=is_local, **keys) as server,
            httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client,
        ):
            for response in requests_to_admin(client):
                assert error_of(response, 401)["code"] == "invalid_api_key"
            # Whoever may generate may not administer, and the other way round.
            for response in requests_to_admin(client, Authorization=f"Bearer {API_KEY}"):
                assert "admin key" in str(error_of(response, 401)["message"])
            status = 401 if api_keys else 200
            headers = {"Authorization": f"Bearer {KEY}"}
            assert client.get("/v1/models", headers=headers).status_code == status
            answers = requests_to_admin(client, Authorization=f"Bearer {KEY}", Host="pool.example")
            assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 404]


def test_api_keys_alone_open_nothing(own_backend: ScriptedBackend) -> None:
    """Neither to those who have one nor to programs of the machine, which need one for /v1."""
    for is_local in (False, True):
        with (
            running(own_backend, key_digests=[digest_of(API_KEY)], is_local=is_local) as server,
            httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client,
        ):
            for headers in ({}, {"Authorization": f"Bearer {API_KEY}"}):
                for response in requests_to_admin(client, **headers):
                    error = error_of(response, 403)
                    assert error["code"] == "admin_closed"
                    assert "admin_key_file" in str(error["message"])


@pytest.mark.parametrize(
    ("host", "is_fine"),
    [
        ("localhost", True),
        ("LocalHost:8000", True),
        ("127.0.0.1:1", True),
        ("127.8.8.8", True),
        ("[::1]:80", True),
        ("", False),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("8.8.8.8", False),
        ("[::2]", False),
        ("[", False),
    ],
)
def test_a_foreign_web_page_cannot_pretend_to_be_here(
    host: str, is_fine: bool, admin: httpx.Client
) -> None:
    for response in requests_to_admin(admin, Host=host):
        if is_fine:
            assert response.status_code != 403
        else:
            assert response.status_code in (400, 403)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ],
)
def test_a_form_cannot_change_anything(
    kind: str | None, admin: httpx.Client, pool: ScriptedBackend, model_directory: Path
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    body = json.dumps({"path": str(model_directory), "name": "new"}).encode()
    for response in (
        admin.post("/admin/models", content=body, headers=headers),
        admin.patch("/admin/models/tiny", content=b'{"priority": 1}', headers=headers),
        admin.request("DELETE", "/admin/models/tiny", headers=headers),
    ):
        assert error_of(response, 415)["code"] == "unsupported_media_type"
    assert admin.options("/admin/models").status_code == 405  # what a browser would ask first
    assert [state.name for state in pool.model_states()] == ["tiny"]
    utf8 = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert admin.request("DELETE", "/admin/models/tiny", headers=utf8).status_code == 202


# -- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "path", "missing"),
        ({"path": ""}, "path", "empty"),
        ({"path": "a/b"}, "path", "absolute"),
        ({"path": "/a\0b"}, "path", "absolute"),
        ({"path": "/" + "x" * 5000}, "path", "absolute"),
        ({"path": "/" + "x" * 400}, "name", "200"),
        ({"path": "/"}, "name", "200"),
        ({"path": 5}, "path", "text"),
        ({"path": "/x", "name": " y"}, "name", "name"),
        ({"path": "/x", "name": "a\nb"}, "name", "name"),
        ({"path": "/x", "name": "y" * (NAME_CHARS_MAX + 1)}, "name", "200"),
        ({"path": "/x", "min_replicas": -1}, "min_replicas", "-1"),
        ({"path": "/x", "min_replicas": "1"}, "min_replicas", "whole number"),
        ({"path": "/x", "min_replicas": True}, "min_replicas", "whole number"),
        ({"path": "/x", "max_replicas": 2**70}, "max_replicas", "largest"),
        ({"path": "/x", "kv_blocks": 1.5}, "kv_blocks", "whole number"),
        ({"path": "/x", "min_replica": 1}, "min_replica", "min_replicas"),
        ({"path": "/x", "roles": "both"}, "roles", "must be a mapping"),
        ({"path": "/x", "roles": {"prefill": {}}}, "roles", "decode is missing"),
        ({"path": "/x", "roles": {"prefill": {}, "decode": 1}}, "roles", "decode must be a"),
        ({"path": "/x", "roles": {"prefil": {}, "decode": {}}}, "roles", "'prefill'"),
        ({"path": "/x", "z" * (KEY_CHARS_MAX + 1): 1}, None, "unknown setting"),
        ({"path": "/nowhere/at/all"}, "path", "not a directory"),
    ],
)
def test_invalid_models(
    body: object, param: str | None, says: str, admin: httpx.Client, pool: ScriptedBackend
) -> None:
    error = error_of(admin.post("/admin/models", json=body), 400)
    assert error["param"] == param
    assert says in str(error["message"])
    assert len(str(error["message"])) < 2000
    assert not pool.added


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"priority": 1, "path": "/other"}, 409, "path"),
        ({"name": "other"}, 409, "name"),
        ({"kv_blocks": 5}, 409, "kv_blocks"),
        ({"prefill_tokens_per_s": 5}, 409, "prefill_tokens_per_s"),
        ({"prioritty": 1}, 400, "prioritty"),
        ({"min_replicas": -1}, 400, "min_replicas"),
        ({"min_replicas": None}, 400, "min_replicas"),
        ({"max_replicas": "many"}, 400, "max_replicas"),
        ({}, 400, None),
    ],
)
def test_what_cannot_be_changed_is_named(
    body: dict[str, object],
    status: int,
    param: str | None,
    admin: httpx.Client,
    pool: ScriptedBackend,
) -> None:
    error = error_of(admin.patch("/admin/models/tiny", json=body), status)
    assert error["param"] == param
    assert (param or "is missing") in str(error["message"])
    assert not pool.changed


def test_limits_of_a_running_model_are_changed(admin: httpx.Client, pool: ScriptedBackend) -> None:
    roles = {"prefill": {"min_replicas": 1}, "decode": {"max_replicas": None}}
    changes = {"min_replicas": 2, "max_replicas": None, "priority": -3, "schedule": ""}
    changes |= {"roles": roles}
    answer = admin.patch("/admin/models/tiny", json=changes)
    assert answer.status_code == 200, answer.text
    assert answer.json()["name"] == "tiny"
    assert pool.changed == [("tiny", changes)]
    error = error_of(admin.patch("/admin/models/none", json=changes), 404)
    assert error["code"] == "model_not_found"


def test_too_many_changes_at_once_are_refused(
    admin: httpx.Client, pool: ScriptedBackend, own_server: LocalServer, model_directory: Path
) -> None:
    """The double answers at once, so the places are taken by calls that never end."""

    async def story() -> None:
        never, asked = asyncio.Event(), threading.Semaphore(0)

        class Hanging(ScriptedBackend):
            async def remove_model(self, name: str) -> None:
                asked.release()
                await never.wait()

        backend = Hanging(pool.models(), [])
        with running(backend, is_local=True) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
                under_way = [
                    asyncio.create_task(
                        client.request("DELETE", "/admin/models/tiny", headers=JSON)
                    )
                    for _ in range(CHANGING_MAX)
                ]
                for _ in under_way:
                    assert await asyncio.to_thread(asked.acquire, timeout=WAIT_S)
                response = await client.request("DELETE", "/admin/models/tiny", headers=JSON)
                assert error_of(response, 503)["code"] == "queue_full"
                server.call(never.set)
                assert [r.status_code for r in await asyncio.gather(*under_way)] == (
                    [202] * CHANGING_MAX
                )

    asyncio.run(story())


keys = st.sampled_from([setting.name for setting in MODEL_SETTINGS]) | st.text(max_size=80)
paths = st.sampled_from(["/", "/nowhere", "/etc", "/etc/passwd", "relative", "/proc/self"])


@given(
    body=st.dictionaries(keys, json_values, max_size=4)
    | st.fixed_dictionaries(
        {"path": paths},
        optional={
            "name": st.text(max_size=10),
            "min_replicas": st.integers(-1, 5),
            "schedule": st.text(max_size=20),
        },
    )
    | json_values
)
@settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_model_gives_a_5xx(body: object, admin: httpx.Client) -> None:
    content = json.dumps(body).encode()
    error_of(admin.post("/admin/models", content=content, headers=JSON), 400)


@given(raw=st.binary(max_size=200))
@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_bytes_give_a_5xx(raw: bytes, admin: httpx.Client) -> None:
    error_of(admin.post("/admin/models", content=raw, headers=JSON), 400)


@given(body=st.dictionaries(keys, json_values, max_size=3) | json_values)
@settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_change_gives_a_5xx(body: object, admin: httpx.Client) -> None:
    response = admin.patch("/admin/models/tiny", content=json.dumps(body).encode(), headers=JSON)
    assert response.status_code in (200, 400, 409), response.text


@given(path=st.text(max_size=30), method=st.sampled_from(["GET", "DELETE", "PUT", "POST"]))
@settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_path_gives_a_5xx(path: str, method: str, admin: httpx.Client) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in path.encode("utf-8", "surrogatepass"))
    response = admin.request(method, f"/admin/models/{quoted}", headers=JSON)
    assert response.status_code == 404 or method in ("PUT", "POST")
    error_of(response, 404 if response.status_code == 404 else 405)


# -- following the backend ------------------------------------------------------------------------

names = ("a", "b", "broken")


@pytest.fixture(scope="module")
def directories(
    model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two that can be read."""
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(model_directory, other, dirs_exist_ok=True)
    return model_directory, other


@given(
    story=st.lists(
        st.tuples(st.frozensets(st.sampled_from(names)), st.booleans(), st.integers(0, 4)),
        max_size=8,
    )
)
@settings(max_examples=examples(60))
def test_what_is_served_is_what_is_offered_and_can_be_read(
    story: list[tuple[frozenset[str], bool, int]], directories: tuple[Path, Path]
) -> None:
    """However fast offers change: a withdrawn model goes at once, a new one comes in the end."""

    def card(name: str, is_other: bool) -> ModelCard:
        directory = Path("/nowhere") if name == "broken" else directories[is_other]
        return ModelCard(name, MODEL_TOKENS_MAX, 0, (1,), directory)

    async def tell() -> None:
        backend = ScriptedBackend((), [])
        metrics = Metrics(())
        served = ServedModels(backend, metrics)
        for offered, is_other, turns in story:
            backend.offer(*(card(name, is_other) for name in sorted(offered)))
            for _ in range(turns):
                check(served, backend, offered)
                await asyncio.sleep(0)
        await served.settled()
        readable = [card for card in backend.models() if card.name != "broken"]
        assert sorted(served.cards(), key=lambda card: card.name) == readable
        for one in backend.models():
            assert (served.problem(one.name) is not None) == (one.name == "broken")
        assert set(metrics.models) == {UNKNOWN_MODEL, *(c.name for c in backend.models())}

    def check(served: ServedModels, backend: ScriptedBackend, offered: frozenset[str]) -> None:
        assert set(served.cards()) <= set(backend.models())
        for name in names:
            if name not in offered:
                with pytest.raises(ApiError) as refused:
                    served.get(name)
                assert refused.value.status == 404

    asyncio.run(tell())


def test_counts_go_with_their_model_and_come_anew() -> None:
    metrics = Metrics(["a", "b"])
    meter = metrics.meter("a", 3, 0.0)
    kept = metrics.models["b"]
    metrics.keep(["b"])
    meter.token(1.0)  # of a request that is still under way
    meter.end("stop", None)
    metrics.request_refused("a", "rejected")
    assert set(metrics.models) == {UNKNOWN_MODEL, "b"}
    assert metrics.models["b"] is kept
    assert metrics.models[UNKNOWN_MODEL].outcomes["rejected"] == 1
    metrics.keep(["a", "b"])
    assert metrics.models["a"].prompt_tokens == 0
