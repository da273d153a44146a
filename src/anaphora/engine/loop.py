"""The engine's own thread: takes requests from any thread, steps, hands outputs back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from anaphora.engine.params import RequestOutput, SamplingParams
from anaphora.engine.stats import EngineStats

if TYPE_CHECKING:
    from anaphora.engine.engine import Engine
    from anaphora.engine.tokenizer import Tokenizer

OnOutput = Callable[[RequestOutput], None]


class EngineLoop:
    """Owns the engine once started; nothing else may call it. Every method here is thread-safe."""

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        raise NotImplementedError

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    @property
    def stats(self) -> EngineStats:
        """A live object: read it, do not keep it."""
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """Why the engine died; None while it is well."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue one sequence. `on_output` is called on the engine's thread, last with a finish_reason.

        Raises ContextTooLong, RequestNeverFits, QueueFull, EngineUnavailable, InvalidRequest (id in use,
        empty prompt, token id outside the vocabulary).
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Free the request's blocks within one step. Unknown or finished ids are ignored. No more output comes."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False when some are in use (those stay)."""
        raise NotImplementedError

    def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for that long, abort the rest, end the thread."""
        raise NotImplementedError
