"""What a client writes reaches the chat template: in a form that it takes, and all of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_double import (
    JSON,
    MODEL_TOKENS_MAX,
    WAIT_S,
    ScriptedBackend,
    build_model_directory,
    running,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from effort import examples
from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.schema import ECHOES, ContentPart, Message
from livescale.gateway.text.chat import ChatTemplate
from livescale.gateway.text.text import TextCodec, TextWork

# Templates are rendered by processes of their own.
pytestmark = pytest.mark.usefixtures("machine")

WORK = TextWork()
relaxed = settings(
    max_examples=examples(200, least=50),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def saying(content: str) -> str:
    return "{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}"


PART_BY_PART = "{% for c in m.content %}{{ c.text }}{% endfor %}"
STRINGS = {
    "prints": saying("{{ m.content }}"),
    "writes JSON": saying("{{ m.content | tojson }}"),
    "adds": saying("{{ '' + m.content }}"),
    "only the first part": saying(
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    ),
    "system messages as strings": saying(
        "{% if m.content is string or m.role == 'system' %}{{ m.content }}"
        "{% else %}" + PART_BY_PART + "{% endif %}"
    ),
}
PARTS = {
    "goes through": saying(PART_BY_PART),
    "raises": saying("{{ raise_exception('?') if m.content is string }}" + PART_BY_PART),
    "system messages as strings or parts": saying(
        "{% if m.content is string and m.role == 'system' %}{{ m.content }}"
        "{% else %}" + PART_BY_PART + "{% endif %}"
    ),
}
FIRST_PART = saying("{{ m.content[0].text }}")
BOTH = {
    "asks": saying(
        "{% if m.content is string %}{{ m.content }}{% else %}" + PART_BY_PART + "{% endif %}"
    ),
    "trims, with a line for each part": saying(
        "{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for c in m.content if c.type == 'text' %}{{ c.text | trim }}\n{% endfor %}{% endif %}"
    ),
}
BOTH["prints parts of tools"] = saying(
    "{% if m.content is string or m.role == 'tool' %}{{ m.content }}{% else %}"
    + PART_BY_PART
    + "{% endif %}"
)
FORMS = [
    *((source, "string") for source in STRINGS.values()),
    *((source, "parts") for source in PARTS.values()),
    *((source, "as it is") for source in BOTH.values()),
    (FIRST_PART, "one part"),
]

texts = st.text(st.sampled_from("ab é\n{'<"), max_size=6)
contents = texts | st.lists(texts, max_size=3)
chats = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), contents),
    min_size=1,
    max_size=4,
)


def tried(source: str) -> ChatTemplate:
    template = ChatTemplate(source, {})
    template.try_out(WORK.renderers)
    return template


def rendered(template: ChatTemplate, messages: list[Message], **options: object) -> str:
    return asyncio.run(
        template.render(WORK.renderers, messages, add_generation_prompt=False, **options)
    )


def message(role: str, content: str | list[str]) -> Message:
    if isinstance(content, str):
        return Message(role, content)
    return Message(role, [ContentPart("text", text) for text in content])


def in_form(role: str, content: str | list[str], form: str) -> str | list[dict[str, str]]:
    """What a template is given. (It is not tried with tools.)"""
    is_list = isinstance(content, list) and content and form in ("parts", "as it is")
    is_list = is_list and role != "tool"
    whole = content if isinstance(content, str) else "\n".join(content)
    if form == "string" or (form == "as it is" and not is_list):
        return whole
    return [{"type": "text", "text": text} for text in (content if is_list else [whole])]


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(model_directory))


@pytest.mark.parametrize(("source", "form"), FORMS)
@given(chat=chats, is_continued=st.booleans())
@relaxed
def test_contents_come_in_the_form_that_the_template_takes(
    source: str,
    form: str,
    chat: list[tuple[str, str | list[str]]],
    is_continued: bool,
    reference: PreTrainedTokenizerFast,
    templates: dict[str, ChatTemplate],
) -> None:
    """As from transformers, to which its users give the right form themselves."""
    is_continued &= source != STRINGS["writes JSON"]  # (the quote is behind the end)
    template = templates[source]
    assert template.left_out == ()
    given_messages = [{"role": role, "content": in_form(role, said, form)} for role, said in chat]
    expected = reference.apply_chat_template(
        given_messages, chat_template=source, continue_final_message=is_continued, tokenize=False
    )
    messages = [message(role, said) for role, said in chat]
    text = rendered(template, messages, continue_final_message=is_continued)
    assert text == expected


@pytest.fixture(scope="module")
def templates(machine: None) -> dict[str, ChatTemplate]:
    return {source: tried(source) for source, _ in FORMS}


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{{ messages | length }}", ("assistant", "system", "user")),
        ("{{ messages[-1].content }}", ("assistant", "system", "user")),
        ("{{ messages[0].content }}", ("assistant", "user")),
        (saying("{{ m.content if m.role == 'system' }}"), ("assistant", "user")),
        (saying("{{ m.content if m.role != 'system' }}"), ("system",)),
        (saying("{{ m.content if m.content is not string }}"), ("assistant", "system", "user")),
        # Of what the template refuses nothing is left out.
        (saying("{{ raise_exception('no') if m.role == 'system' }}{{ m.content }}"), ()),
    ],
)
def test_what_a_template_leaves_out_is_known(source: str, roles: tuple[str, ...]) -> None:
    assert tried(source).left_out == roles


fields = ("name", "reasoning", "reasoning_content", "tool_call_id")


@given(given_fields=st.lists(st.dictionaries(st.sampled_from(fields), texts), min_size=1))
@relaxed
def test_fields_of_messages_reach_the_template(given_fields: list[dict[str, str]]) -> None:
    template = ChatTemplate("{{ messages | tojson }}", {})
    messages = [Message("tool", "x", **given) for given in given_fields]
    expected = [{"role": "tool", "content": "x", **given} for given in given_fields]
    assert json.loads(rendered(template, messages)) == expected


# -- over HTTP ------------------------------------------------------------------------------------

EFFORT = "{{ reasoning_effort if reasoning_effort is defined else 'some' }}" + saying(
    "{{ m.content }}"
)


def directory_with(template: str, directory: Path) -> Path:
    build_model_directory(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (STRINGS["prints"], "[user]hi\nyou"),
        (PARTS["raises"], "[user]hiyou"),
        (BOTH["asks"], "[user]hiyou"),
        (FIRST_PART, "[user]hi\nyou"),
    ],
)
def test_a_model_is_read_with_the_form_of_its_template(
    source: str, text: str, tmp_path: Path
) -> None:
    codec = TextCodec.load(directory_with(source, tmp_path), WORK)
    assert asyncio.run(codec.render_chat([message("user", ["hi", "you"])], False)) == text


@pytest.fixture(scope="module")
def thinking(
    machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, ScriptedBackend]]:
    """A pool with a model whose template knows how much to think."""
    directory = directory_with(EFFORT, tmp_path_factory.mktemp("thinking"))
    card = ModelCard("thinking", MODEL_TOKENS_MAX, 1_700_000_000, (1,), directory)
    backend = ScriptedBackend((card,), [5, 6])
    with (
        running(backend, is_local=True) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False, headers=JSON) as client,
    ):
        yield client, backend


@pytest.mark.parametrize(
    ("given_effort", "said"),
    [({}, "some"), ({"reasoning_effort": None}, "some"), ({"reasoning_effort": "low"}, "low")],
)
def test_the_effort_is_the_templates(
    given_effort: dict[str, str | None],
    said: str,
    thinking: tuple[httpx.Client, ScriptedBackend],
    tokenizer: Tokenizer,
) -> None:
    client, backend = thinking
    backend.reset()
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "thinking", **given_effort}
    expected = tokenizer.encode(f"{said}[user]hi", add_special_tokens=False).ids
    assert client.post("/tokenize", json=chat).json()["tokens"] == expected
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    [stream] = backend.streams
    assert list(stream.request.prompt_ids) == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_an_effort_that_changes_nothing_is_refused(
    path: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/completions":
        asked = {"prompt": "hi"}
    body = {"model": "tiny", **asked, "reasoning_effort": "low"}
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")
    assert "low" in error["message"]
    assert backend.streams == []
    assert http.post(path, json={**body, "reasoning_effort": None}).status_code == 200


def ask(client: httpx.Client, *messages: object) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})


USER = {"role": "user", "content": "hi"}


@given(
    name=st.text(st.sampled_from("ab`'.-é "), min_size=1, max_size=5) | st.just("x" * 2000),
    value=st.sampled_from([None, [], "", 1, {"a": 1}]),
    place=st.integers(0, 2),
)
@relaxed
def test_unknown_fields_of_messages_are_named(
    name: str, value: object, place: int, http: httpx.Client
) -> None:
    messages = [USER] * place + [{**USER, name: value}]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = http.post(path, json={"model": "tiny", "messages": messages})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "unknown_parameter"
        assert error["param"].startswith(f"messages[{place}].{name[:200]}")
        assert error["param"] in error["message"]
        assert len(error["message"]) < 300


def test_messages_of_answers_can_be_sent_back(http: httpx.Client) -> None:
    answered = ask(http, USER).json()["choices"][0]["message"]
    assert ask(http, USER, answered, USER).status_code == 200
    # As OpenAI's client has them.
    openai = {"role": "assistant", "content": "x", **dict.fromkeys(ECHOES)}
    assert ask(http, USER, openai, {**openai, "annotations": [], "tool_calls": []}).is_success
    assert ask(http, {**openai, "refusal": ""}).is_success


@pytest.mark.parametrize("name", ECHOES)
def test_what_answers_have_and_templates_are_not_given_is_refused(
    name: str, http: httpx.Client, backend: ScriptedBackend
) -> None:
    for value in ("no", {"a": 1}, [{}], 0, False):
        answer = ask(http, USER, {"role": "assistant", "content": "x", name: value})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (f"messages[1].{name}", "unsupported_parameter")
    assert backend.streams == []


def test_a_template_that_leaves_contents_out_is_told_of(
    thinking: tuple[httpx.Client, ScriptedBackend],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, _ = thinking
    assert client.get("/admin/models/thinking").json()["warnings"] == []
    source = saying("{{ m.content if m.role == 'system' }}")
    directory = directory_with(source, tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        answer = client.post("/admin/models", json={"path": str(directory), "name": "deaf"})
    assert answer.status_code == 201, answer.text
    [warning] = answer.json()["warnings"]
    assert "model deaf: " in warning
    assert "messages of role assistant, user." in warning
    assert [line.getMessage() for line in caplog.records] == [warning]
    listed = {model["name"]: model for model in client.get("/admin/models").json()["data"]}
    assert listed["deaf"]["warnings"] == [warning]
