"""Streams of one model, read from inside a namespace: a line when all have begun, then one with
what came. Started by tests: `ray_client.py URL COUNT TOKENS`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httpx


async def main(url: str, count: int, tokens: int) -> None:
    begun: set[int] = set()

    async def read(client: httpx.AsyncClient, number: int) -> list[str]:
        texts: list[str] = []
        body = {
            "model": "tiny",
            "prompt": [7 + number, *range(20, 50)],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                [choice] = event["choices"]
                texts.append(choice["text"])
                begun.add(number)
                if len(begun) == count:
                    begun.add(-1)
                    print(json.dumps("begun"), flush=True)
        return ["".join(texts), str(choice["finish_reason"])]

    # Whoever has started this ends it.
    async with httpx.AsyncClient(timeout=None) as client:
        answers = await asyncio.gather(*(read(client, number) for number in range(count)))
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
