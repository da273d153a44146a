"""The sequences of one HTTP request: submitted together, read together, freed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from anaphora.engine.loop import EngineLoop
from anaphora.engine.outcome import TokenSources
from anaphora.engine.params import FinishReason, RequestOutput, SamplingParams
from anaphora.errors import EngineUnavailable
from anaphora.server.errors import ClientDisconnected, GenerationFailed
from anaphora.server.responses import Explain, Finish, PromptTokensDetails, SourceTokens, Usage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished sequence as the steps that made it."""

    outputs: tuple[RequestOutput, ...]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def finish_reason(self) -> Finish:
        return finish(self.outputs[-1].finish_reason)

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[-1].stop_reason


class Generation:
    """Prompts x choices; sequence `p * n + c` is choice c of prompt p and has the id `{request_id}-{p * n + c}`.

    Whoever calls `start` must call `answers` or `close`, whatever happens in between.
    """

    def __init__(
        self,
        engine: EngineLoop,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[SamplingParams],
        cache_salt: str | None,
        pin_seconds: float = 0.0,
        explains: bool = False,
    ) -> None:
        """`explains`: the answer says where the prompts' keys and values came from."""
        self.explains = explains
        self.request_id = request_id
        self._engine = engine
        self._jobs = [(prompt, params) for prompt in prompts for params in choices]
        self._ids = [f"{request_id}-{index}" for index in range(len(self._jobs))]
        self._num_choices = len(choices)
        self._caching: Mapping[str, Any] = {"cache_salt": cache_salt, "pin_seconds": pin_seconds}
        self._latest: dict[int, RequestOutput] = {}
        self._open: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()

    def start(self) -> None:
        """Submit every sequence, or none. Raises what EngineLoop.submit raises."""
        try:
            for index, (prompt, params) in enumerate(self._jobs):
                self._engine.submit(self._ids[index], prompt, params, self._receiver(index), **self._caching)
                self._open.add(index)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what has not finished: the blocks of a client that went away are free within one step."""
        for index in self._open:
            self._engine.abort(self._ids[index])
        self._open.clear()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(sequence, what one step added), until all have finished.

        Raises GenerationFailed or EngineUnavailable when the engine gives a sequence up.
        """
        while self._open:
            index, output = await self._queue.get()
            self._latest[index] = output
            if output.finish_reason is not None:
                self._open.discard(index)
            if output.finish_reason in ("abort", "error"):
                kind = EngineUnavailable if output.finish_reason == "abort" else GenerationFailed
                raise kind(output.error or "The engine gave this request up; send it again.")
            yield index, output

    async def answers(self, receive: Receive) -> list[Answer]:
        """All sequences, finished, in order; closes the generation, however it ends.

        Raises what `outputs` raises, and ClientDisconnected.
        """
        made: list[list[RequestOutput]] = [[] for _ in self._jobs]

        async def collect() -> None:
            async for index, output in self.outputs():
                made[index].append(output)

        try:
            await while_connected(receive, collect())
        finally:
            self.close()
        return [Answer(tuple(outputs)) for outputs in made]

    def usage(self) -> Usage:
        """Of what has come so far. A prompt counts once, with the cached tokens of its first choice."""
        firsts = [output for index, output in self._latest.items() if index % self._num_choices == 0]
        prompt = sum(output.num_prompt_tokens for output in firsts)
        completion = sum(output.num_output_tokens for output in self._latest.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(output.num_cached_tokens for output in firsts)),
        )

    def explained(self) -> dict[str, Any]:
        """The answer's `explain`, if it was asked for. Once all sequences have finished."""
        if not self.explains:
            return {}
        firsts = [output for index, output in self._latest.items() if index % self._num_choices == 0]
        total = TokenSources()
        for output in firsts:
            if output.sources is not None:
                total.add(output.sources)
        parts = {name: SourceTokens(tokens=each.tokens, seconds=each.seconds) for name, each in total.items()}
        return {"explain": Explain(**parts)}

    def _receiver(self, index: int) -> Callable[[RequestOutput], None]:
        loop, queue = asyncio.get_running_loop(), self._queue

        def receive(output: RequestOutput) -> None:
            with suppress(RuntimeError):  # the event loop has ended: nobody is left to read
                loop.call_soon_threadsafe(queue.put_nowait, (index, output))

        return receive


def finish(reason: FinishReason | None) -> Finish:
    """The reason of a sequence that ended well."""
    assert reason in ("stop", "length"), reason
    return reason


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnected when the client leaves first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
