"""A model's tokenizer, from the files of its directory. No texts of requests.

The files are read as `AutoTokenizer` of `transformers` (5.x) reads them, in its order and with its
precedence (`TokenizersBackend`), so that a prompt has the ids that the model was trained on:

1. `tokenizer.json` has the vocabulary, and added tokens of its own.
2. If `tokenizer_config.json` has `added_tokens_decoder`, then the two files below are not read.
   Else `special_tokens_map.json` replaces fields of the configuration, and `added_tokens.json` adds
   tokens.
3. These tokens are added in the order of their ids, then the special ones that are still missing.

(`transformers` itself is not used: to import it takes seconds.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "config.json"

TEXT_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    TEMPLATE_FILE,
    MODEL_FILE,
)
"""All that a gateway reads of a model's directory."""

_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
"""Special tokens that every model may have. They are added in this order."""

_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Fields for further special tokens: the name that counts if both are there, and its old name."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_ID_MAX = 2**32 - 1

_Token = str | AddedToken


@dataclass(frozen=True, eq=False, repr=False)
class TokenizerFiles:
    """What the files of `directory` say.

    `tokenizer` has all tokens that any file adds, and neither cuts nor lengthens a text.
    `special_tokens` has those that a chat template knows by name (`bos_token` and its like).
    `template` is the source of the chat template, if there is one.
    """

    directory: Path
    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    template: str | None

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files. Raises ValueError that names the file which cannot be read, or two files
        that contradict each other about the id of a token, with what each of them says."""
        tokenizer = _read_tokenizer(directory / TOKENIZER_FILE)
        config = read_json(directory / CONFIG_FILE)
        special = _SpecialTokens(config, directory / CONFIG_FILE)
        if "added_tokens_decoder" in config:
            source = directory / CONFIG_FILE
            declared = _tokens_by_id(config["added_tokens_decoder"], source)
            known = declared
        else:
            path = directory / SPECIAL_TOKENS_FILE
            special.replace(read_json(path), path)
            source = directory / ADDED_TOKENS_FILE
            declared = special.flagged(_ids_by_token(source))
            known = declared | tokenizer.get_added_tokens_decoder()
        _refuse_contradictions(declared, source, tokenizer, directory / TOKENIZER_FILE)
        if tokenizer.padding is not None:
            special.fields.setdefault("pad_token", tokenizer.padding["pad_token"])
        named = special.named()
        _add_tokens(tokenizer, known, named, special.extra())
        _refuse_gaps(declared, source, tokenizer, directory / TOKENIZER_FILE)
        tokenizer.encode_special_tokens = special.are_split()
        # A saved tokenizer may carry training settings that would cut or lengthen prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        texts = {name: str(token) for name, token in named.items()}
        return cls(directory, tokenizer, texts, _read_template(directory, config))

    def __repr__(self) -> str:
        return f"<TokenizerFiles {self.directory}>"


def foreign_tokens(tokenizer: Tokenizer, vocabulary: int) -> dict[int, str]:
    """Tokens that the tokenizer can make and a model of `vocabulary` ids does not have, by id."""
    made = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    # What a post-processor puts around a text need not be in the vocabulary.
    frame = tokenizer.encode("")
    made.update(zip(frame.ids, frame.tokens, strict=True))
    return {token_id: made[token_id] for token_id in sorted(made) if token_id >= vocabulary}


def read_json(path: Path) -> dict[str, Any]:
    """A model's JSON file; empty where there is none. Raises ValueError naming it."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ValueError(f"{path} is missing. LiveScale needs a fast tokenizer (tokenizer.json)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The template's file, else the configured one; of several named ones the `default`."""
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = (entry for entry in template if isinstance(entry, dict))
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default")
    return template if isinstance(template, str) else None


class _SpecialTokens:
    """Special tokens of `tokenizer_config.json`, and what `special_tokens_map.json` replaces.

    `fields` has the files' values, tokens of the configuration as JSON objects still.
    """

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.fields = dict(config)
        self._path = path
        if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
            self.fields["extra_special_tokens"] = self.fields.pop("additional_special_tokens")
        #: tokens with names that only this model has; no other file replaces these
        self._own = {
            name: self.fields.pop(name)
            for name, value in config.items()
            if name.endswith("_token") and name not in _NAMES and isinstance(value, str)
        }
        self._settle_extra(path)

    def replace(self, fields: dict[str, Any], path: Path) -> None:
        """Take the fields of `special_tokens_map.json`."""
        for name, value in fields.items():
            if isinstance(value, list) and name in _EXTRA:
                value = [_token(token, path, is_special=True) for token in value]
                if name == "extra_special_tokens":
                    extra = list(self.fields.get(name) or [])
                    value = extra + [token for token in value if token not in extra]
            elif isinstance(value, dict) and name != "extra_special_tokens":
                value = _token(value, path, is_special=True)
            elif value is not None and name in _NAMES:
                value = _token(value, path)
            self.fields[name] = value
        self._settle_extra(path)

    def flagged(self, ids: dict[str, int]) -> dict[int, AddedToken]:
        """Tokens of `added_tokens.json`, which has no flags: special if another file says so."""
        # Objects of the configuration do not count here, as in transformers.
        values = [self.fields.get(name) for name in _NAMES]
        values += self.fields.get("extra_special_tokens") or []
        special = {str(value) for value in values if isinstance(value, _Token)}
        return {
            token_id: AddedToken(token, special=token in special, normalized=token not in special)
            for token, token_id in ids.items()
        }

    def named(self) -> dict[str, _Token]:
        """Tokens by name. Raises ValueError for a value that is not a token."""
        named = {
            name: _token(self.fields[name], self._path)
            for name in _NAMES
            if self.fields.get(name) is not None
        }
        own = {
            name: value
            for name, value in self.fields.items()
            if name.endswith("_token")
            and name not in _NAMES
            and (isinstance(value, _Token) or (isinstance(value, dict) and "content" in value))
        }
        for name, value in (own | self._own).items():
            named[name] = _token(value, self._path)
        return named

    def extra(self) -> list[_Token]:
        """Special tokens without a name."""
        name = next((name for name in _EXTRA if name in self.fields), None)
        values = (self.fields[name] if name else None) or []
        return [_token(value, self._path) for value in values]

    def are_split(self) -> bool:
        """Special tokens that stand in a text are cut into pieces like any other text."""
        value = self.fields.get("split_special_tokens", False)
        if not isinstance(value, bool):
            raise ValueError(f"{self._path}: split_special_tokens is not a boolean: {value!r}")
        return value

    def _settle_extra(self, path: Path) -> None:
        """Extra tokens are a list. An object of them, which gives them names, is taken apart."""
        if isinstance(self.fields.get("extra_special_tokens"), dict):
            self._own.update(self.fields.pop("extra_special_tokens"))
        for name in _EXTRA:
            if not isinstance(self.fields.get(name), list | None):
                raise ValueError(f"{path}: {name} is not a list: {self.fields[name]!r}")


def _token(value: Any, path: Path, is_special: bool = False) -> _Token:
    """The token that a JSON string or object stands for. Objects are special if that is asked for,
    or if they are not marked as a token: there is then no other reason to name them."""
    if isinstance(value, _Token):
        return value
    is_special = is_special or (isinstance(value, dict) and "__type" not in value)
    return _object_token(value, path, is_special)


def _object_token(value: Any, path: Path, is_special: bool = False) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ValueError(f"{path}: {value!r} is not a token")
    content, flags = value["content"], {name: value[name] for name in _FLAGS if name in value}
    if is_special:
        flags["special"] = True
    try:
        return AddedToken(content, **flags)
    except TypeError as error:
        raise ValueError(
            f"{path}: the token {content!r} has a flag that is none: {error}"
        ) from error


def _tokens_by_id(decoder: Any, path: Path) -> dict[int, AddedToken]:
    """The tokens of `added_tokens_decoder`."""
    if not isinstance(decoder, dict):
        raise ValueError(f"{path}: added_tokens_decoder is not an object")
    tokens = {}
    for token_id, value in decoder.items():
        if not token_id.isdecimal() or int(token_id) > _ID_MAX:
            raise ValueError(f"{path}: added_tokens_decoder has the id {token_id!r}")
        tokens[int(token_id)] = _object_token(value, path)
    return tokens


def _ids_by_token(path: Path) -> dict[str, int]:
    """The content of `added_tokens.json`."""
    ids: dict[int, str] = {}
    for token, token_id in read_json(path).items():
        if type(token_id) is not int or not 0 <= token_id <= _ID_MAX:
            raise ValueError(f"{path}: the token {token!r} has the id {token_id!r}")
        if token_id in ids:
            raise ValueError(f"{path} gives the id {token_id} to {ids[token_id]!r} and {token!r}")
        ids[token_id] = token
    return {token: token_id for token_id, token in ids.items()}


def _refuse_contradictions(
    declared: dict[int, AddedToken], source: Path, tokenizer: Tokenizer, path: Path
) -> None:
    """Raises ValueError if `source` and the tokenizer of `path` use a token or an id otherwise."""
    added = tokenizer.get_added_tokens_decoder()
    for token_id, token in declared.items():
        known_id, known = tokenizer.token_to_id(token.content), tokenizer.id_to_token(token_id)
        if token_id in added:  # (tokenizers shows these as its normalizer changes them)
            known = added[token_id].content
        if known_id not in (None, token_id):
            raise ValueError(
                f"{source} and {path} contradict each other: the token {token.content!r} has the id"
                f" {token_id} in the former, and {known_id} in the latter"
            )
        if token.content and known not in (None, token.content):
            raise ValueError(
                f"{source} and {path} contradict each other: the id {token_id} is"
                f" {token.content!r} in the former, and {known!r} in the latter"
            )


def _add_tokens(
    tokenizer: Tokenizer,
    by_id: dict[int, AddedToken],
    named: dict[str, _Token],
    extra: Iterable[_Token],
) -> None:
    """Add the tokens: a known one gets the new flags, a new one the next id."""
    tokens: list[_Token] = [by_id[token_id] for token_id in sorted(by_id)]
    present = {str(token) for token in tokens}
    present.update(token.content for token in tokenizer.get_added_tokens_decoder().values())
    for token in (*named.values(), *extra):
        if str(token) not in present and token not in tokens:
            tokens.append(token)
    names = {str(token) for token in named.values()}
    added = []
    for token in tokens:
        if isinstance(token, str):
            token = AddedToken(token, special=True)
        elif str(token) in names:
            token.special = True
        added.append(token)
    tokenizer.add_tokens(added)


def _refuse_gaps(
    declared: dict[int, AddedToken], source: Path, tokenizer: Tokenizer, path: Path
) -> None:
    """Raises ValueError if a token did not get the id that `source` has for it: a tokenizer has no
    ids without tokens."""
    for token_id, token in sorted(declared.items()):
        given = tokenizer.token_to_id(token.content)
        if token.content and given != token_id:
            raise ValueError(
                f"{source} and {path} contradict each other: the token {token.content!r} has the id"
                f" {token_id} in the former, and behind the tokens of the latter comes {given}"
            )
