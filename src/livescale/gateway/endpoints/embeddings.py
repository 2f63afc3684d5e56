"""POST /v1/embeddings: what is asked of the backend, and the answer's bytes.

An embedding is a request that ends with its prompt: the one token that comes brings it.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

import msgspec

from livescale.gateway.contract import answers
from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.errors import invalid, quoted
from livescale.gateway.contract.schema import PROMPTS_MAX, EmbeddingBody
from livescale.gateway.requests.choices import FLOAT_BYTES, Piece, TextRules
from livescale.gateway.requests.replies import Reply, ReplyHead
from livescale.gateway.requests.sampling import Asked
from livescale.values.types import SamplingParams

OUTPUT_TOKENS = 1


def read_embeddings(card: ModelCard, body: EmbeddingBody, inputs: int) -> Asked:
    """What the body asks of each of its inputs. Raises ApiError (400) that names the parameter."""
    if not card.embedding_size:
        raise invalid(
            f"{quoted(card.name)} does not support embeddings. Use a model with embeddings",
            "model",
            "unsupported_value",
        )
    if body.dimensions not in (None, card.embedding_size):
        raise invalid(
            f"dimensions must be absent or {card.embedding_size}, the size of every embedding of"
            f" {quoted(card.name)}, got {body.dimensions}",
            "dimensions",
            "unsupported_value",
        )
    if inputs > PROMPTS_MAX:
        raise invalid(
            f"{inputs} inputs are given, above the maximum of {PROMPTS_MAX} per request",
            "input",
            "invalid_value",
        )
    return Asked(
        choices=1,
        sampling=SamplingParams(0, embeds=True),
        rules=TextRules(),
        output_tokens=None,
        is_seed_given=True,
    )


class EmbeddingReply(Reply):
    """The answer, with numbers or with the base64 of their bytes."""

    def __init__(self, head: ReplyHead, *, is_base64: bool) -> None:
        super().__init__(head)
        self._is_base64 = is_base64

    def whole(self, choices: Sequence[Piece]) -> bytes:
        tokens = sum(map(len, self.head.prompts))
        body = answers.EmbeddingList(
            **self.head.front,
            data=[answers.Embedding(piece.choice, self._values(piece)) for piece in choices],
            usage=answers.EmbeddingUsage(tokens, tokens),
        )
        return msgspec.json.encode(body)

    def _values(self, piece: Piece) -> list[float] | str:
        content = piece.embedding
        assert content is not None, f"choice {piece.choice} has no embedding"
        if self._is_base64:
            return base64.b64encode(content).decode()
        return [*struct.unpack(f"<{len(content) // FLOAT_BYTES}f", content)]
