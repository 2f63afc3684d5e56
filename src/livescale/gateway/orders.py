"""From a checked body and its prompts to the generations that are made for it."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.gateway.backend import Client, GenerateRequest, ModelCard
from livescale.gateway.choices import ChoiceOrder
from livescale.gateway.prompts import Prompt
from livescale.gateway.sampling import Asked
from livescale.gateway.text import TextCodec
from livescale.types import RequestId


def choice_orders(
    asked: Asked,
    prompts: Sequence[Prompt],
    card: ModelCard,
    codec: TextCodec,
    *,
    request: RequestId,
    client: Client,
    client_request_id: str | None,
    arrived_s: float,
    tokens_default: int,
    param: str,
) -> list[ChoiceOrder]:
    """`asked.choices` generations of each prompt, numbered prompt after prompt as OpenAI does.

    A request with one generation gives it its own id, else ids have the choice's number behind.
    `arrived_s` is on the monotonic clock.
    Raises ApiError (400) if a prompt and its output do not fit the model.
    """
    total = len(prompts) * asked.choices
    orders = []
    for index in range(total):
        prompt = prompts[index // asked.choices]
        sampling = asked.of(card, len(prompt.ids), tokens_default, index, param)
        generate = GenerateRequest(
            request if total == 1 else f"{request}.{index}",
            card.name,
            prompt.ids,
            sampling,
            client_request_id,
            round(arrived_s * 1e9),
            client,
        )
        orders.append(ChoiceOrder(index, generate, asked.rules, codec, prompt.echo))
    return orders
