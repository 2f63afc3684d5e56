"""Text to ids and back: what is streamed is exactly what the tokenizer would decode at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_double import TEMPLATE, TEXT, build_model_directory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from effort import examples
from livescale.gateway.contract.errors import ApiError
from livescale.gateway.contract.schema import ContentPart, Message
from livescale.gateway.text.chat import ChatTemplate
from livescale.gateway.text.detokenizing import (
    HELD_TOKENS_MAX,
    Detokenizer,
    Detokenizers,
    TokenDecoder,
)
from livescale.gateway.text.spelling import TokenSpelling
from livescale.gateway.text.text import OFF_LOOP_CHARS, TextCodec, TextWork

# Templates are rendered by processes of their own.
pytestmark = pytest.mark.usefixtures("machine")

WORK = TextWork()

unicode_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
relaxed = settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pieces_of(decoder: Detokenizer, ids: list[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def decode_stepwise(tokenizer: Tokenizer, ids: list[int], skips: bool = True) -> list[str]:
    return pieces_of(Detokenizers(tokenizer).make(skips), ids)


@given(text=unicode_text)
@relaxed
def test_pieces_join_to_the_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(decode_stepwise(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 319), max_size=30), skips=st.booleans())
@relaxed
def test_any_tokens_join_to_what_the_tokenizer_decodes(
    ids: list[int], skips: bool, tokenizer: Tokenizer
) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skips)
    assert "".join(decode_stepwise(tokenizer, ids, skips)) == whole


@given(
    texts=st.lists(st.one_of(unicode_text, st.just("\ufffd"), st.just("🦊日本"))),
    cut=st.integers(0, 9),
    more=st.lists(st.integers(0, 319), max_size=9),
    skips=st.booleans(),
)
@relaxed
def test_any_decoder_gives_the_same_text_and_holds_one_character_at_most(
    texts: list[str], cut: int, more: list[int], skips: bool, tokenizer: Tokenizer
) -> None:
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids[:-1]]
    ids[cut:cut] = more
    whole = tokenizer.decode(ids, skip_special_tokens=skips)
    pieces = decode_stepwise(tokenizer, ids, skips)
    assert "".join(pieces) == "".join(pieces_of(TokenDecoder(tokenizer, skips), ids)) == whole
    for count in range(len(ids) + 1):
        sent = "".join(pieces[:count])
        so_far = tokenizer.decode(ids[:count], skip_special_tokens=skips)
        # (Python waits for the third byte of a surrogate, whose first two are two replacements.)
        assert so_far in (sent, sent + "\ufffd", sent + "\ufffd\ufffd")
        assert whole.startswith(sent), "sent what has to be taken back"


def test_bytes_that_begin_no_character_are_replaced_at_once(tokenizer: Tokenizer) -> None:
    """0x80 goes on with a character, 0xff is in none, and 0xc3 begins one."""
    pieces = decode_stepwise(tokenizer, byte_ids(tokenizer, b"\x80\x80\xff\xc3\xc3"))
    assert pieces == ["\ufffd", "\ufffd", "\ufffd", "", "\ufffd", "\ufffd"]


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    byte_of = {spelled: i for i in range(320) for _, spelled in [TokenSpelling(tokenizer).of(i)]}
    return [byte_of[bytes([byte])] for byte in content]


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer, text_ids: list[int]) -> None:
    pieces = decode_stepwise(tokenizer, text_ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_an_incomplete_character_is_flushed_as_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦊", add_special_tokens=False).ids[:-1]
    assert decode_stepwise(tokenizer, ids)[-1] == "\ufffd"


@pytest.fixture(scope="module")
def byte_fallback_tokenizer() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@given(text=unicode_text)
@relaxed
def test_byte_fallback_pieces_join_to_the_text(
    text: str, byte_fallback_tokenizer: Tokenizer
) -> None:
    ids = byte_fallback_tokenizer.encode(text).ids
    assert "".join(decode_stepwise(byte_fallback_tokenizer, ids)) == text


@given(ids=st.lists(st.integers(0, 257), max_size=30))
@relaxed
def test_broken_bytes_do_not_stop_a_byte_fallback_stream(
    ids: list[int], byte_fallback_tokenizer: Tokenizer
) -> None:
    decode_stepwise(byte_fallback_tokenizer, ids)


class CountedTokenizer:
    """A tokenizer that knows how many tokens it has decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


broken_cycles = st.one_of(
    st.just(b"\x80"),
    st.just("\ufffd".encode()),
    st.lists(st.sampled_from([b"\x80", b"\xc3", b"\xff", "é🦊\ufffd".encode()]), min_size=1).map(
        b"".join
    ),
)


@given(first=st.binary(max_size=5), cycle=broken_cycles, is_byte_level=st.booleans())
@settings(relaxed, max_examples=examples(60))
def test_a_token_costs_the_same_however_many_broken_ones_came_before(
    first: bytes,
    cycle: bytes,
    is_byte_level: bool,
    tokenizer: Tokenizer,
    byte_fallback_tokenizer: Tokenizer,
) -> None:
    content = first + cycle * (600 // len(cycle))
    kind = tokenizer if is_byte_level else byte_fallback_tokenizer
    counted: Any = CountedTokenizer(kind)
    decoder = Detokenizers(counted).make(skips_special_tokens=True)
    ids = byte_ids(kind, content) if is_byte_level else list(content)
    pieces, costs = [], []
    for token_id in ids:
        before = counted.decoded
        pieces.append(decoder.push(token_id))
        costs.append(counted.decoded - before)
    # (What has left may be changed by a broken byte: that is found out by decoding all, once.)
    costs.remove(max(costs))
    assert max(costs) <= 12 * HELD_TOKENS_MAX
    whole, sent = kind.decode(ids), "".join(pieces)
    if whole.startswith(sent):
        assert sent + decoder.flush() == whole


@given(text=st.text("\ufffdé🦊a", min_size=1, max_size=40))
@relaxed
def test_replacements_that_are_text_do_not_break_what_stands_behind_them(
    text: str, byte_fallback_tokenizer: Tokenizer, tokenizer: Tokenizer
) -> None:
    for kind in (byte_fallback_tokenizer, tokenizer):
        ids = kind.encode(text, add_special_tokens=False).ids
        assert "".join(pieces_of(TokenDecoder(kind), ids)) == kind.decode(ids)


WORDS = ("\u2581the", "\u2581fox", "es", "\u2581", "a", "</s>")


@pytest.fixture(scope="module")
def spacing_tokenizer() -> Tokenizer:
    """As those of Llama 2 and Mistral: the first word's space is taken away."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + place for place, word in enumerate(("<unk>", *WORDS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def streamed(run: bytes) -> str:
    """What may leave of bytes one behind the other: whole characters at once, and what is left of
    bytes that are none as replacements. (A replacement itself may be the start of anything.)"""
    with contextlib.suppress(UnicodeDecodeError):
        return run.decode()
    for end in range(len(run) - 1, 0, -1):
        with contextlib.suppress(UnicodeDecodeError):
            if not (text := run[:end].decode()).endswith("\ufffd"):
                return text + "\ufffd" * (len(run) - end)
    return "\ufffd" * len(run)


runs = st.one_of(
    st.sampled_from(WORDS),
    st.text(st.sampled_from("é🦊日\ufffdA"), min_size=1, max_size=3).map(str.encode),
    # (A space as a byte would be taken away at the beginning, unlike its replacement.)
    st.binary(min_size=1, max_size=3).filter(lambda run: b" " not in run),
    st.sampled_from([b"\xff", b"\xc3", "é".encode(), "🦊".encode()[:3]]),
)


@given(runs=st.lists(runs, max_size=24), skips=st.booleans())
@relaxed
def test_nothing_is_lost_behind_broken_bytes(
    runs: list[str | bytes], skips: bool, spacing_tokenizer: Tokenizer
) -> None:
    ids = [
        token_id
        for run in runs
        for token_id in (run if isinstance(run, bytes) else [spacing_tokenizer.token_to_id(run)])
    ]
    expected = ""
    told = [run for run in runs if not (skips and run == "</s>")]
    for is_bytes, group in itertools.groupby(told, lambda run: isinstance(run, bytes)):
        if is_bytes:
            expected += streamed(b"".join(group))
        else:
            expected += "".join(group).replace("\u2581", " ")
    *sent, rest = decode_stepwise(spacing_tokenizer, ids, skips)
    whole = spacing_tokenizer.decode(ids, skip_special_tokens=skips)
    text = "".join([*sent, rest])
    assert text == expected.removeprefix(" ")
    if whole.startswith("".join(sent)):
        assert text == whole


async def encode_chat(codec: TextCodec, messages: list[Message]) -> tuple[int, ...]:
    return await codec.encode(await codec.render_chat(messages), add_special_tokens=False)


def test_long_text_gives_the_same_ids_off_the_loop(
    model_directory: Path, tokenizer: Tokenizer
) -> None:
    codec = TextCodec.load(model_directory, WORK)
    long = "the quick brown fox " * OFF_LOOP_CHARS
    assert list(asyncio.run(codec.encode(long))) == tokenizer.encode(long).ids
    chat = asyncio.run(encode_chat(codec, [Message("user", long)]))
    rendered = f"<s><|user|>{long}<|assistant|>"
    assert list(chat) == tokenizer.encode(rendered, add_special_tokens=False).ids


@given(texts=st.lists(unicode_text, max_size=4), special=st.booleans())
@relaxed
def test_several_texts_are_encoded_like_one(
    texts: list[str], special: bool, model_directory: Path, tokenizer: Tokenizer
) -> None:
    codec = TextCodec.load(model_directory, WORK)
    alone = [tuple(tokenizer.encode(text, add_special_tokens=special).ids) for text in texts]
    assert asyncio.run(codec.encode_all(texts, special)) == alone


def test_chat_is_rendered_with_special_tokens_once(
    model_directory: Path, tokenizer: Tokenizer
) -> None:
    codec = TextCodec.load(model_directory, WORK)
    messages = [
        Message("developer", "be brief"),
        Message("user", [ContentPart("text", "one"), ContentPart("text", "two")]),
        Message("assistant", None),
    ]
    ids = asyncio.run(encode_chat(codec, messages))
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    assert text == "<s><|system|>be brief<|user|>one\ntwo<|assistant|><|assistant|>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}{% generation %}x{% endgeneration %}",
        [{"name": "default", "template": "{{ messages[0]['content'] }}x"}],
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}x",
    ],
)
def test_template_dialects(tmp_path: Path, template: object) -> None:
    directory = build_model_directory(tmp_path)
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    codec = TextCodec.load(directory, WORK)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(list(asyncio.run(encode_chat(codec, [Message("user", "hi")])))) == "hix"


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    directory = build_model_directory(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        TextCodec.load(directory, WORK)


def test_a_template_has_the_tokens_of_all_files(tmp_path: Path) -> None:
    directory = build_model_directory(tmp_path)
    template = "{{ bos_token }}{{ bos_token[1] }}<|im|>{{ messages[0].content }}"
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").unlink()
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (directory / "added_tokens.json").write_text('{"<|im|>": 320}')
    codec = TextCodec.load(directory, WORK)
    ids = asyncio.run(encode_chat(codec, [Message("user", "x")]))
    assert codec.token_strings(ids) == ["<s>", "s", "<|im|>", "x"]


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    directory = build_model_directory(tmp_path)
    (directory / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        TextCodec.load(directory, WORK)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        TextCodec.load(tmp_path, WORK)


def test_the_vocabulary_is_the_models(tmp_path: Path, tokenizer: Tokenizer) -> None:
    directory = build_model_directory(tmp_path)
    assert TextCodec.load(directory, WORK).vocabulary == tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    assert TextCodec.load(directory, WORK).vocabulary == 4096


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(model_directory))


@given(
    contents=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), unicode_text), min_size=1
    )
)
@relaxed
def test_ids_are_those_of_transformers(
    contents: list[tuple[str, str]], model_directory: Path, reference: PreTrainedTokenizerFast
) -> None:
    codec = TextCodec.load(model_directory, WORK)
    chat = [{"role": role, "content": text} for role, text in contents]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    messages = [Message(role, text) for role, text in contents]
    assert list(asyncio.run(encode_chat(codec, messages))) == expected
    for _, text in contents:
        expected = reference(text, truncation=False)["input_ids"]
        assert list(asyncio.run(codec.encode(text))) == expected


DEVELOPERS = (
    "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
)
DOCUMENTS = "{% if documents is none and tools is none %}{{ messages[0].role }}{% endif %}"


@pytest.mark.parametrize("template", [DEVELOPERS, DOCUMENTS])
def test_templates_get_the_roles_and_names_of_transformers(
    template: str, reference: PreTrainedTokenizerFast
) -> None:
    roles = ["system", "developer", "user"] if template == DEVELOPERS else ["user"]
    chat = [{"role": role, "content": "x"} for role in roles]
    expected = reference.apply_chat_template(chat, chat_template=template, tokenize=False)
    messages = [Message(role, "x") for role in roles]
    rendering = ChatTemplate(template, {}).render(WORK.renderers, messages, False)
    assert asyncio.run(rendering) == expected != ""


STRIPPING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"


@given(
    contents=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), unicode_text), min_size=1),
    template=st.sampled_from([TEMPLATE, STRIPPING]),
)
@relaxed
def test_a_message_is_continued_as_in_transformers(
    contents: list[tuple[str, str]], template: str, reference: PreTrainedTokenizerFast
) -> None:
    chat = [{"role": role, "content": text} for role, text in contents]
    expected = reference.apply_chat_template(
        chat, chat_template=template, continue_final_message=True, tokenize=False
    )
    messages = [Message(role, text) for role, text in contents]
    rendering = ChatTemplate(template, {"bos_token": "<s>"}).render(
        WORK.renderers, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert asyncio.run(rendering) == expected


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ApiError, match="final message"):
        asyncio.run(
            template.render(
                WORK.renderers, [Message("user", "a"), Message("user", "b")], False, True
            )
        )
