"""What an administrator should know of a model though it can be served: sentences for its entry.

What cannot be served is refused in `catalog.py`.
"""

from __future__ import annotations

from pathlib import Path

from livescale.config.pool import PoolConfig
from livescale.engine.errors import ModelError
from livescale.engine.model_config import parse_config
from livescale.gateway.tokenizer_files import TokenizerFiles, foreign_tokens
from livescale.types import Manifest, ModelSpec

_NAMED_TOKENS = 5
"""A warning about tokens names so many of them."""


def kv_warnings(
    config: PoolConfig, spec: ModelSpec, request_tokens_max: int, block_bytes: int
) -> tuple[str, ...]:
    """KV memory that holds less than one request of the model's whole length. A block of it takes
    `block_bytes`, those of all leaders together."""
    if request_tokens_max >= spec.model_tokens_max:
        return ()
    needed_bytes = -(-(spec.model_tokens_max - 1) // config.block_tokens) * block_bytes
    return (
        f"model {spec.name}: requests may have {request_tokens_max} tokens, the model could take"
        f" {spec.model_tokens_max}: kv_bytes is {config.kv_bytes}, for all of them it would have"
        f" to be {needed_bytes}",
    )


def read_tokenizer_warnings(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    """Tokens whose ids the embedding does not have. Raises ModelError for a tokenizer whose files
    cannot be read or contradict each other: no request could be read, either."""
    vocabulary = parse_config(manifest.config_json, f"config of {manifest.model}").vocab_size
    try:
        foreign = foreign_tokens(TokenizerFiles.read(directory).tokenizer, vocabulary)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if not foreign:
        return ()
    named = [f"{token!r} ({token_id})" for token_id, token in foreign.items()]
    more = f" and {len(named) - _NAMED_TOKENS} more" if len(named) > _NAMED_TOKENS else ""
    return (
        f"model {manifest.model}: the tokenizer makes token ids that the model does not have"
        f" (vocab_size is {vocabulary}): {', '.join(named[:_NAMED_TOKENS])}{more}. Prompts with"
        " these tokens are refused",
    )
