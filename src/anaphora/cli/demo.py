"""`serve --demo`: two chats that share a long system prompt, cold and warm, against the server just started."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import httpx

SYSTEM_TOKENS = 2000
QUESTIONS = (
    "When does the reading room open on weekdays? Answer briefly.",
    "May I eat in the library? Answer briefly.",
)

_INTRODUCTION = (
    "You are the assistant of the Harbour Library. Answer visitors' questions in one or two sentences. "
    "The reading room opens at nine on weekdays and at ten on Saturdays. Food is allowed in the cafe only. "
)
_PLACES = ("reading room", "map room", "music corner", "archive", "cafe", "garden", "children's floor", "print shop")
_RULES = (
    "visitors may stay until an hour before closing time",
    "bags larger than a sheet of A4 paper go into a locker",
    "phones are on silent and calls are taken outside",
    "two librarians are there to help at all times",
    "lost things are kept at the front desk for a month",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """One streamed chat as the client saw it."""

    answer: str
    ttft: float
    """Seconds from sending the request to the first content chunk."""
    prompt_tokens: int
    cached_tokens: int


def system_prompt(client: httpx.Client, model: str) -> str:
    """A house-rules text that the server itself counts as about SYSTEM_TOKENS tokens."""
    rules = [
        f"Rule {n + 1}: in the {_PLACES[n % len(_PLACES)]}, {_RULES[n // len(_PLACES) % len(_RULES)]}."
        for n in range(400)
    ]

    def count(number: int) -> int:
        text = _INTRODUCTION + " ".join(rules[:number])
        reply = client.post("/tokenize", json={"model": model, "prompt": text})
        reply.raise_for_status()
        return int(reply.json()["count"])

    low, high = 0, len(rules)
    while low < high:
        middle = (low + high) // 2
        if count(middle) < SYSTEM_TOKENS:
            low = middle + 1
        else:
            high = middle
    return _INTRODUCTION + " ".join(rules[:low])


def chat(client: httpx.Client, model: str, system: str, question: str, max_tokens: int = 48) -> Chat:
    """Stream one greedy chat and time its first content."""
    body = {
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer: list[str] = []
    ttft = 0.0
    usage: dict[str, object] = {}
    sent = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            reply.read()
            reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    ttft = ttft or time.perf_counter() - sent
                    answer.append(choice["delta"]["content"])
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens", 0) if isinstance(details, dict) else 0
    return Chat("".join(answer).strip(), ttft, int(str(usage.get("prompt_tokens", 0))), int(cached))


def run(base_url: str, model: str, bytes_per_token: int, api_key: str | None) -> None:
    """Show it on the terminal. Failures are told in one line; the server goes on."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=600, trust_env=False) as client:
            system = system_prompt(client, model)
            chats = [chat(client, model, system, question) for question in QUESTIONS]
    except httpx.HTTPError as error:
        console.print(f"The demonstration failed ({error}); the server goes on.", markup=False)
        return
    cold, warm = chats
    console.print(f"\nEvery token keeps {bytes_per_token:,} bytes of keys and values in the KV cache.")
    console.print(
        f"Two chats share a system prompt of about {SYSTEM_TOKENS:,} tokens "
        f"({SYSTEM_TOKENS * bytes_per_token / 2**20:,.1f} MiB of KV, computed once):\n"
    )
    table = Table()
    for column in ("chat", "prompt tokens", "reused", "time to first token"):
        table.add_column(column, justify="left" if column == "chat" else "right")
    table.add_row("cold: first of its kind", f"{cold.prompt_tokens:,}", f"{cold.cached_tokens:,}", f"{cold.ttft:.3f} s")
    table.add_row("warm: same prefix", f"{warm.prompt_tokens:,}", f"{warm.cached_tokens:,}", f"{warm.ttft:.3f} s")
    console.print(table)
    console.print(f"The shared prefix made the first token come {cold.ttft / warm.ttft:.1f} times sooner.\n")
    for question, one in zip(QUESTIONS, chats, strict=True):
        console.print(f"Q: {question}\nA: {one.answer}\n", markup=False, highlight=False)


def next_steps(base_url: str, model: str) -> str:
    """What to type in another terminal."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Name three uses of a rope."}]})
    return (
        f"The server runs at {base_url} (Ctrl-C ends it). In another terminal:\n\n"
        f"  curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  curl {base_url}/metrics\n"
    )
