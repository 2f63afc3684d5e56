"""`max_model_tokens` as clients and administrators see it: from a pool's file to HTTP.

The model's files are prepared and offered as in a pool; the double answers for its instances.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from gateway_double import WAIT_S, ScriptedBackend, running

from livescale.config.reading import load_config
from livescale.runtime.gateway_process.pool_backend import PoolBackend
from livescale.runtime.models.catalog import prepare_models, published
from livescale.runtime.wire.boot import GatewayBoot
from livescale.runtime.wire.protocol import Address, Catalog
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

OWN = 4096
"""Tokens that the tiny model takes by itself."""


def pool_of(model: Path, tmp_path: Path, limit: int | None) -> PoolBackend:
    """The gateway's side of a pool whose file gives the model this limit."""
    path = tmp_path / "pool.yaml"
    given = "" if limit is None else f", max_model_tokens: {limit}"
    path.write_text(f"models:\n  - {{path: '{model}', name: m{given}}}\n")
    config = load_config(path, [], {}, {})
    [entry] = prepare_models(config)
    return PoolBackend(
        GatewayBoot(
            secret="",
            gateway="g0",
            listen_fd=-1,
            controller=Address("127.0.0.1", 1),
            catalog=Catalog(tuple(published(config, config.models[0], entry))),
            pool=config,
            key_digests=(),
        )
    )


@pytest.mark.parametrize("limit", [None, 2, 100, OWN])
def test_clients_see_the_limit_of_a_model_and_are_held_to_it(
    tiny_model: Path, tmp_path: Path, limit: int | None
) -> None:
    pool = pool_of(tiny_model, tmp_path, limit)
    assert [state.max_model_tokens for state in pool.model_states()] == [limit]
    tokens = OWN if limit is None else limit
    fitting = [(1, tokens - 1), (tokens - 1, 1), (tokens - 1, None)]
    too_long = [(1, tokens), (tokens - 1, 2), (tokens, None), (tokens + 1, 1)]
    with (
        running(ScriptedBackend(pool.models(), [5])) as server,
        httpx.Client(base_url=server.url, timeout=patient(WAIT_S), trust_env=False) as http,
    ):
        [shown] = http.get("/v1/models").json()["data"]
        text = http.post("/tokenize", json={"model": "m", "prompt": "a"}).json()
        assert shown["max_model_len"] == text["max_model_len"] == tokens
        for prompt, answer in fitting + too_long:
            body = {"model": "m", "prompt": [5] * prompt, "max_tokens": answer}
            response = http.post("/v1/completions", json=body)
            is_refused = response.status_code == 400
            assert is_refused == ((prompt, answer) in too_long), (prompt, answer, response.text)
            if is_refused:
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert f"takes at most {tokens}" in error["message"]
            else:
                assert response.status_code == 200, response.text
