"""What an administrator should know of a model though it can be served: sentences for its entry.

What cannot be served is refused in `catalog.py`.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from livescale.config.pool import PoolConfig
from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_config import parse_config
from livescale.gateway.text.tokenizer_files import TokenizerFiles, foreign_tokens
from livescale.values.types import Manifest

_NAMED_TOKENS = 5
"""A warning about tokens names so many of them."""


def kv_warnings(
    config: PoolConfig, name: str, tokens_max: int, request_tokens_max: int, block_bytes: int
) -> tuple[str, ...]:
    """KV memory that holds less than one request of `tokens_max`, which the model could take. A
    block of it takes `block_bytes`, those of all leaders together."""
    if request_tokens_max >= tokens_max:
        return ()
    needed_bytes = -(-(tokens_max - 1) // config.block_tokens) * block_bytes
    return (
        f"model {name}: requests may have {request_tokens_max} tokens instead of "
        f"{tokens_max}, because kv_bytes is {config.kv_bytes}. For all tokens, set "
        f"kv_bytes to {needed_bytes}",
    )


def read_tokenizer_warnings(
    directory: Path, manifest: Manifest, eos_token_ids: tuple[int, ...]
) -> tuple[str, ...]:
    """Tokens whose ids the embedding does not have, and an end token that ends nothing.

    Raises ModelError for a tokenizer whose files cannot be read or contradict each other: no
    request could be read, either.
    """
    vocabulary = parse_config(manifest.config_json, f"config of {manifest.model}").vocab_size
    try:
        files = TokenizerFiles.read(directory)
    except ValueError as error:
        raise ModelError(str(error)) from error
    tokenizer, end = files.tokenizer, files.special_tokens.get("eos_token")
    return (
        *_foreign_warnings(manifest.model, foreign_tokens(tokenizer, vocabulary), vocabulary),
        *_end_warnings(manifest.model, tokenizer, end, eos_token_ids),
    )


def _foreign_warnings(model: str, foreign: dict[int, str], vocabulary: int) -> tuple[str, ...]:
    if not foreign:
        return ()
    named = [f"{token!r} ({token_id})" for token_id, token in foreign.items()]
    more = f" and {len(named) - _NAMED_TOKENS} more" if len(named) > _NAMED_TOKENS else ""
    return (
        f"model {model}: the tokenizer makes token ids that the model does not have"
        f" (vocab_size is {vocabulary}): {', '.join(named[:_NAMED_TOKENS])}{more}. Prompts with"
        " these tokens are refused",
    )


def _end_warnings(
    model: str, tokenizer: Tokenizer, end: str | None, eos_token_ids: tuple[int, ...]
) -> tuple[str, ...]:
    """Generation ends by ids of the model's files; those of the tokenizer are not asked."""
    end_id = None if end is None else tokenizer.token_to_id(end)
    if end_id is None or end_id in eos_token_ids:
        return ()
    known = ", ".join(map(str, eos_token_ids)) or "none"
    return (
        f"model {model}: the tokenizer's eos_token {end!r} ({end_id}) does not end answers: the"
        f" eos_token_id of generation_config.json, or else of config.json, is {known}. Add"
        f" {end_id} to it if answers should end there",
    )
