"""The engine's own thread: takes requests from any thread, steps, hands outputs back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from anaphora.engine.params import RequestOutput, SamplingParams
from anaphora.engine.stats import EngineStats
from anaphora.errors import EngineUnavailable, InvalidRequest, QueueFull

if TYPE_CHECKING:
    from anaphora.engine.engine import Engine
    from anaphora.engine.tokenizer import Tokenizer
    from anaphora.explain.explainer import Explainer

logger = logging.getLogger(__name__)

OnOutput = Callable[[RequestOutput], None]
_FAILED_STEPS = 3
"""So many steps failing in a row mean that the engine, not a request, is broken."""


class EngineLoop:
    """Owns the engine once started; nothing else may call it. Every method here is thread-safe.

    Callers leave commands in a queue; the engine's thread runs them between steps, so a step never sees a
    half-made change and an abort takes effect within one step.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._callbacks: dict[str, OnOutput] = {}
        self._news = False
        self._draining = False
        self._stop_at: float | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="anaphora-engine", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def prefix_caching(self) -> bool:
        return self._engine.config.enable_prefix_caching

    @property
    def explainer(self) -> Explainer:
        """Its `outcomes` may be read from any thread."""
        return self._engine.explainer

    @property
    def stats(self) -> EngineStats:
        """A live object: read it, do not keep it."""
        return self._engine.stats

    @property
    def failure(self) -> str | None:
        """Why the engine died; None while it is well."""
        return self._failure

    def start(self) -> None:
        if self._engine.tiers is not None:
            self._engine.tiers.bell.listener = self._tell
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        cache_salt: str | None = None,
        pin_seconds: float = 0.0,
    ) -> None:
        """Queue one sequence. `on_output` is called on the engine's thread, last with a finish_reason.

        Raises ContextTooLong, RequestNeverFits, QueueFull, EngineUnavailable, InvalidRequest (id in use,
        empty prompt, token id outside the vocabulary).
        """
        self._engine.check(prompt_ids, params)
        with self._wake:
            if self._failure is not None:
                raise EngineUnavailable(f"the engine has failed ({self._failure}); restart the server")
            if self._draining:
                raise EngineUnavailable("the server is shutting down; send the request to another one")
            if request_id in self._callbacks:
                raise InvalidRequest(f"request id {request_id!r} is in use; choose another", param="request_id")
            if len(self._callbacks) - self._engine.stats.num_running >= self._max_waiting:
                raise QueueFull(
                    f"{self._max_waiting} requests wait already; try again in a moment, or restart the server "
                    "with a larger --max-waiting",
                    retry_after=1,
                )
            self._callbacks[request_id] = on_output
            prompt = tuple(prompt_ids)
            self._commands.append(lambda: self._add(request_id, prompt, params, cache_salt, pin_seconds))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Free the request's blocks within one step. Unknown or finished ids are ignored. No more output comes."""
        with self._wake:
            if self._callbacks.pop(request_id, None) is None:
                return
            self._commands.append(lambda: self._drop(request_id))
            self._wake.notify()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False when some are in use (those stay). Waits for the step that runs."""
        done = threading.Event()
        answer: list[bool] = []

        def reset() -> None:
            answer.append(self._engine.reset_prefix_cache())
            done.set()

        with self._wake:
            if not self._thread.is_alive():
                raise EngineUnavailable("the engine is not running; restart the server")
            self._commands.append(reset)
            self._wake.notify()
        while not done.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise EngineUnavailable("the engine stopped before the cache was reset")
        return answer[0]

    def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for that long, abort the rest, end the thread."""
        with self._wake:
            self._draining = True
            self._stop_at = time.monotonic() + drain_seconds
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                for output in self._engine.step():
                    self._deliver(output)
                if self._engine.failed_steps >= _FAILED_STEPS:
                    raise RuntimeError(self._engine.last_error)
        except Exception as error:
            logger.exception("the engine stopped")
            self._failure = f"{type(error).__name__}: {error}"
        with self._wake:
            self._draining = True
            orphans = list(self._callbacks)
            self._commands.clear()
        reason = self._failure or "the server shut down before the request finished"
        for request_id in orphans:
            with suppress(Exception):  # what broke the step may break this too, and everyone must hear of it
                self._engine.abort(request_id)
            self._deliver(RequestOutput(request_id, finish_reason="error" if self._failure else "abort", error=reason))
        try:
            self._engine.close()
        except Exception:
            logger.exception("the cache's tiers could not be closed; what they hold is verified when it is read")

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do. False when it is time to end."""
        with self._wake:
            while True:
                left = self._stop_at - time.monotonic() if self._stop_at is not None else None
                if left is not None and (left <= 0 or not (self._commands or self._engine.has_work)):
                    return False
                seconds = self._engine.patience()
                if self._commands or self._news or seconds == 0:
                    self._news = False
                    return True
                self._wake.wait(min((each for each in (seconds, left) if each is not None), default=None))

    def _tell(self) -> None:
        """A transfer is over: the engine's thread has something to do. Called on any thread."""
        with self._wake:
            self._news = True
            self._wake.notify()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None,
        pin_seconds: float,
    ) -> None:
        """A request that cannot be added loses itself, never the engine."""
        try:
            self._engine.add(request_id, prompt, params, cache_salt=cache_salt, pin_seconds=pin_seconds)
        except Exception as error:
            logger.exception("request %s could not be added", request_id)
            self._deliver(RequestOutput(request_id, finish_reason="error", error=f"{type(error).__name__}: {error}"))

    def _drop(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def _deliver(self, output: RequestOutput) -> None:
        """A callback that raises loses its own request, never the engine."""
        callback = self._callbacks.get(output.request_id)
        if callback is None:
            return
        if output.finish_reason is not None:
            self._callbacks.pop(output.request_id, None)
        try:
            callback(output)
        except Exception:
            logger.exception("the receiver of request %s failed; the request is dropped", output.request_id)
            self._callbacks.pop(output.request_id, None)
            self._engine.abort(output.request_id)
