"""A model's tokenizer, from the files of its directory. No chat templates, no texts of requests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the model in `directory`. Raises ValueError that names the file."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a model needs a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{path} cannot be read: {error}") from error


def foreign_tokens(tokenizer: Tokenizer, vocabulary: int) -> dict[int, str]:
    """Tokens that the tokenizer can make and a model of `vocabulary` ids does not have, by id."""
    made = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    # What a post-processor puts around a text need not be in the vocabulary.
    frame = tokenizer.encode("")
    made.update(zip(frame.ids, frame.tokens, strict=True))
    return {token_id: made[token_id] for token_id in sorted(made) if token_id >= vocabulary}
