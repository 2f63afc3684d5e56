"""A tokenizer's files are read as `AutoTokenizer` reads them; contradictions are refused."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer

from effort import examples
from livescale.gateway.text.text import TextCodec
from livescale.gateway.text.tokenizer_files import TokenizerFiles

MARKERS = ("<s>", "</s>", "<|Im|>", "<|end|>", "<pad>", "word", "Q", "ab")
NAMES = ("bos_token", "eos_token", "pad_token", "image_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

markers = st.sampled_from(MARKERS)
flags = st.dictionaries(st.sampled_from(FLAGS), st.booleans())


def marked(content: str, chosen: dict[str, bool]) -> dict[str, Any]:
    """A token as an object of tokenizer_config.json."""
    return {"__type": "AddedToken", "content": content, **chosen}


def bare(content: str, chosen: dict[str, bool]) -> dict[str, Any]:
    """A token as an object of special_tokens_map.json."""
    return {"content": content, **chosen}


@dataclass
class Files:
    """What is written into a directory. Ids of `declared` tokens are given when that is done."""

    normalizer: str
    is_framed: bool
    is_padded: bool
    #: added tokens of tokenizer.json, with their flags
    own: dict[str, dict[str, bool]]
    #: tokens with ids of another file: `added_tokens_decoder`, or added_tokens.json
    declared: dict[str, dict[str, bool]]
    has_decoder: bool
    config: dict[str, Any]
    special: dict[str, Any] | None
    ids: dict[str, int] = field(default_factory=dict)

    def write(self, directory: Path, moved: dict[str, int] | None = None) -> None:
        """`moved` has ids that the declared tokens get instead of right ones."""
        tokenizer = self._tokenizer()
        tokenizer.save(str(directory / "tokenizer.json"))
        end = max(tokenizer.get_vocab().values()) + 1
        for token in self.declared:
            known = tokenizer.token_to_id(token)
            self.ids[token] = end if known is None else known
            end += known is None
        self.ids |= moved or {}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        if self.has_decoder:
            config["added_tokens_decoder"] = {
                str(self.ids[token]): {"content": token, **chosen}
                for token, chosen in self.declared.items()
            }
        elif self.declared:
            (directory / "added_tokens.json").write_text(json.dumps(self.ids))
        if self.special is not None:
            (directory / "special_tokens_map.json").write_text(json.dumps(self.special))
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))

    def _tokenizer(self) -> Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = ("wo", "rd", "ab", "word")
        tokenizer = Tokenizer(
            models.BPE(
                vocab={piece: place for place, piece in enumerate((*alphabet, *pieces))},
                merges=[("w", "o"), ("r", "d"), ("a", "b"), ("wo", "rd")],
            )
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if self.normalizer == "lower":
            tokenizer.normalizer = normalizers.Lowercase()
        elif self.normalizer == "prepend":
            tokenizer.normalizer = normalizers.Prepend("_")
        for content, chosen in self.own.items():
            tokenizer.add_tokens([AddedToken(content, **chosen)])
        if self.is_framed:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("a"))]
            )
        if self.is_padded:
            tokenizer.enable_padding(length=4, pad_id=0, pad_token="<pad>")
            tokenizer.enable_truncation(3)
        return tokenizer


def fields(
    tokens: st.SearchStrategy[Any],
    extra: st.SearchStrategy[Any],
    additional: st.SearchStrategy[Any],
) -> st.SearchStrategy[dict[str, Any]]:
    """Special tokens of a file: with names, and without by the field's new and its old name."""
    return st.fixed_dictionaries(
        {},
        optional={
            **{name: tokens | st.none() for name in NAMES},
            "extra_special_tokens": extra,
            "additional_special_tokens": additional,
            "split_special_tokens": st.booleans(),
        },
    )


def some(tokens: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(tokens, max_size=2)


# An object of extra tokens gives them names.
by_name = st.dictionaries(st.sampled_from(["boi_token", "image_token"]), markers, max_size=2)
config_tokens = markers | st.builds(marked, markers, flags)
config_fields = fields(
    config_tokens, some(config_tokens) | by_name | st.none(), some(config_tokens)
)
# Some objects make transformers fail: here those of a list that say whether they are special, and
# all of the old name.
without_special = st.dictionaries(st.sampled_from(FLAGS[:-1]), st.booleans())
special_fields = fields(
    markers | st.builds(bare, markers, flags),
    some(markers | st.builds(bare, markers, without_special)) | by_name,
    some(markers),
)
tables = st.dictionaries(markers, flags, max_size=4)
variants = st.builds(
    Files,
    normalizer=st.sampled_from(["none", "lower", "prepend"]),
    is_framed=st.booleans(),
    is_padded=st.booleans(),
    own=tables,
    declared=tables,
    has_decoder=st.booleans(),
    config=config_fields,
    special=st.none() | special_fields,
)
texts = st.lists(markers | st.sampled_from([" ", "  ", "\n", "wor", "Ab", "q", "é", "<|im|>"]))


@given(files=variants, text=texts.map("".join))
@settings(max_examples=examples(300), deadline=None)
def test_files_are_read_as_transformers_reads_them(files: Files, text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        files.write(Path(name))
        reference = AutoTokenizer.from_pretrained(name)
        codec = TextCodec.load(Path(name))
        read = TokenizerFiles.read(Path(name))
    assert read.special_tokens == reference.special_tokens_map
    assert codec.vocabulary == len(reference)
    for is_framed in (True, False):
        expected = reference.encode(text, add_special_tokens=is_framed, truncation=False)
        assert list(asyncio.run(codec.encode(text, is_framed))) == expected
    ids = [*expected, *range(codec.vocabulary - 6, codec.vocabulary), *expected]
    for skips in (True, False):
        decoder = codec.decoder(skips)
        decoded = "".join(map(decoder.push, ids)) + decoder.flush()
        assert decoded == reference.decode(ids, skip_special_tokens=skips)


@given(
    files=variants,
    moved=st.lists(
        st.tuples(markers, st.sampled_from([0, 64, *range(255, 272)])),
        min_size=1,
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    ).map(dict),
)
@settings(max_examples=examples(200), deadline=None)
def test_ids_that_transformers_would_change_are_refused(
    files: Files, moved: dict[str, int]
) -> None:
    files.declared = {token: {} for token in moved}
    source = "tokenizer_config.json" if files.has_decoder else "added_tokens.json"
    with tempfile.TemporaryDirectory() as name:
        files.write(Path(name), moved)
        vocabulary = AutoTokenizer.from_pretrained(name).get_vocab()
        wrong = {token: i for token, i in moved.items() if vocabulary.get(token) != i}
        if not wrong:
            TokenizerFiles.read(Path(name))
            return
        with pytest.raises(ValueError, match=source) as refused:
            TokenizerFiles.read(Path(name))
    assert any(repr(token) in str(refused.value) for token in wrong)
    assert any(str(token_id) in str(refused.value) for token_id in wrong.values())
