"""Engine: composes scheduler, model runner, sampler and text; one `step` moves every running request on."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from anaphora.blocks.eviction import make_policy
from anaphora.blocks.hashing import HashChain, Namespace
from anaphora.blocks.manager import KVCacheManager
from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.config import EngineConfig
from anaphora.engine.output_text import OutputText, TextDelta
from anaphora.engine.params import FinishReason, RequestOutput, SamplingParams
from anaphora.engine.request import Request
from anaphora.engine.runner import ModelRunner, StepLogits
from anaphora.engine.salvage import row_by_row
from anaphora.engine.sampler import SampleFailure, SampleRow, sample
from anaphora.engine.scheduler import Scheduler
from anaphora.engine.stats import EngineStats
from anaphora.engine.tokenizer import Tokenizer
from anaphora.errors import ContextTooLong, CorruptModel, InvalidRequest, RequestNeverFits
from anaphora.explain.explainer import Explainer
from anaphora.geometry.layout import CacheLayout
from anaphora.types import BlockId, RequestId

if TYPE_CHECKING:
    from anaphora.engine.tiering.kv_tiers import KVTiers

logger = logging.getLogger(__name__)
_MEASURED_TOKENS = 32
_MEASURED_CONTEXT = 2048


class Engine:
    """Not thread-safe: one thread calls `add`, `abort` and `step` (see EngineLoop)."""

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        namespace: Namespace,
        tiers: Callable[[KVCacheManager], KVTiers] | None = None,
    ) -> None:
        """`namespace` says what blocks hold, but for adapter and salt; `tiers` makes what lies behind the pool."""
        self.config = config
        self.tokenizer = tokenizer
        self.runner = runner
        self.vocab_size = vocab_size
        self.failed_steps = 0
        """Steps in a row that could not be computed."""
        self.last_error = ""
        self.cache = KVCacheManager(
            config.num_blocks,
            config.block_size,
            [group.window for group in layout.groups],
            make_policy(config.eviction_policy),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.tiers = tiers(self.cache) if tiers is not None else None
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            offload=self.tiers,
        )
        self.stats = EngineStats(
            blocks_total=config.num_blocks,
            blocks_free=config.num_blocks,
            block_size=config.block_size,
            bytes_per_token=config.bytes_per_token,
        )
        self.explainer = Explainer(
            self.cache,
            partial(tokenizer.decode, skip_special_tokens=False),
            block_bytes=config.block_bytes,
            serving=lambda: self.scheduler.serving,
        )
        self._layout = layout
        self._namespace = namespace
        self._arrivals = 0
        self._stalled = False
        if self.tiers is not None:
            self.stats.tiers = self.tiers.snapshot
            self.stats.tier_decisions = self.tiers.decisions

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests)

    def patience(self) -> float | None:
        """Seconds until `step` has something to do; None: when a command, or the tiers' bell, says so."""
        if not self.scheduler.requests:
            return None
        if not self._stalled or self.tiers is None:
            return 0.0
        seconds = self.tiers.patience()
        return 0.0 if seconds is None and not self.tiers.busy else seconds

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Whether the request can run; returns its limit of new tokens. Changes nothing.

        Raises InvalidRequest, ContextTooLong (with both numbers), RequestNeverFits.
        """
        context, prompt = self.config.max_model_len, len(prompt_ids)
        if prompt == 0:
            raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            bad = next(t for t in prompt_ids if not 0 <= t < self.vocab_size)
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {self.vocab_size}", param="prompt")
        if prompt >= context:
            raise ContextTooLong(
                f"the prompt has {prompt} tokens and the context is {context}, which must hold at least one new "
                f"token too. Shorten the prompt to {context - 1} tokens or restart with a larger --max-model-len",
                param="prompt",
            )
        max_tokens = context - prompt if params.max_tokens is None else params.max_tokens
        if prompt + max_tokens > context:
            raise ContextTooLong(
                f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: {prompt + max_tokens} together, "
                f"but the context is {context}. Lower max_tokens to {context - prompt} or shorten the prompt",
                param="max_tokens",
            )
        needed = self._layout.blocks_for(prompt + max_tokens - 1, self.config.max_num_batched_tokens)
        if needed > self.config.num_blocks:
            raise RequestNeverFits(
                f"prompt and max_tokens need {needed} KV blocks and the pool has {self.config.num_blocks}. "
                "Lower max_tokens, shorten the prompt, or restart with a larger --kv-memory",
                param="max_tokens",
            )
        return max_tokens

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        pin_seconds: float = 0.0,
    ) -> None:
        """Queue a sequence; its blocks are pinned for `pin_seconds` from its end on.

        Raises what `check` raises, and InvalidRequest when the id is in use.
        """
        if RequestId(request_id) in self.scheduler.requests:
            raise InvalidRequest(f"request id {request_id!r} is in use; choose another", param="request_id")
        max_tokens = self.check(prompt_ids, params)
        namespace = replace(self._namespace, cache_salt=cache_salt or "")
        seed = params.seed if params.seed is not None else self.config.seed
        self.scheduler.add(
            Request(
                request_id=RequestId(request_id),
                arrival=self._arrivals,
                prompt_ids=prompt_ids,
                params=params,
                max_tokens=max_tokens,
                seed=secrets.randbits(63) if seed is None else seed,
                chain=HashChain(namespace.key, self.config.block_size),
                text=OutputText(self.tokenizer, params, prompt_ids),
                pin_seconds=pin_seconds,
            )
        )
        self._arrivals += 1
        self._stalled = False

    def abort(self, request_id: str) -> bool:
        """Free a request's blocks now. False when there is no such request (finished already)."""
        request = self.scheduler.requests.get(RequestId(request_id))
        if request is None:
            return False
        self._finish(request, "abort")
        self._stalled = False
        self._update_gauges()
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block of the pool; False when some are in use (those stay). Tiers keep theirs."""
        if self.tiers is not None:
            self.tiers.poll()
        done = self.cache.reset_prefix_cache()
        self.explainer.reset()
        self._update_gauges()
        return done

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, sample; returns what was added to each request that got a token or ended.

        A request that cannot be computed ends with "error"; a step without any that can counts in `failed_steps`.
        """
        began = time.monotonic()
        batch = self.scheduler.schedule()
        self._count_admissions(began)
        self._stalled = not batch.rows
        if not batch.rows:
            self._update_gauges()
            return []
        computing = time.monotonic()
        try:
            step = self.runner.step(batch)
        except Exception as error:
            logger.exception("a step of %d tokens failed", batch.num_tokens)
            outputs = self._salvage(batch, error)
        else:
            self.failed_steps = 0
            self._attribute(batch, time.monotonic() - computing)
            outputs = self._computed(batch, [(batch, step)])
        self.stats.step_time.observe(time.monotonic() - began)
        self._update_gauges()
        return outputs

    def close(self, seconds: float = 10.0) -> None:
        """Let tiers finish what is queued, within that time. Nothing may be called after it."""
        if self.tiers is not None:
            self.tiers.close(seconds)

    def warm_up(self) -> None:
        """Run one token through the model, so that the first request does not pay for first-time set-up.

        Writes to block 0 only, which nothing owns yet. Raises CorruptModel when no next token comes out.
        """
        tables = tuple((BlockId(0),) for _ in self._layout.groups)
        logits = self.runner.execute(Batch((BatchRow(RequestId("warm-up"), (0,), 0, tables, sample=True),)))
        if not bool(logits.max().isfinite()):  # NaN survives max
            raise CorruptModel(
                f"the model in {self.config.model_path} computes NaN or infinity: the weights are whole, so "
                "config.json does not belong to them (fetch the model again), or --dtype float32 is needed"
            )

    def measure_prefill(self) -> None:
        """Run a few tokens through the model, so that tiers know what computing costs before the first request.

        Once at the start of a sequence, once far into one. Like `warm_up`. Does nothing where there are no tiers.
        """
        if self.tiers is None:
            return
        config, size = self.config, self.config.block_size
        room = min(config.num_blocks * size, config.max_model_len)
        count = min(_MEASURED_TOKENS, room, config.max_num_batched_tokens)
        for start in (0, 0, min(_MEASURED_CONTEXT, room) - count):  # the first pays for what is touched first
            tables = tuple(tuple(map(BlockId, range(-(-(start + count) // size)))) for _ in self._layout.groups)
            batch = Batch((BatchRow(RequestId("measure"), (0,) * count, start, tables, sample=True),))
            began = time.monotonic()
            self.runner.execute(batch)
            self.tiers.observe(batch, time.monotonic() - began)

    def _salvage(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """The batch failed: end those of its requests that fail alone too, and go on with the others."""
        found = row_by_row(self.runner, batch, error)
        outputs = []
        for row, reason in found.failed:
            self.last_error = f"{type(reason).__name__}: {reason}"
            outputs += [self._failed(request) for request in self.scheduler.fail(Batch((row,)))]
        self.failed_steps = 0 if found.done else self.failed_steps + 1
        done = Batch(tuple(row for row, _ in found.done), batch.copies)
        return outputs + self._computed(done, [(Batch((row,)), step) for row, step in found.done])

    def _computed(self, batch: Batch, steps: Sequence[tuple[Batch, StepLogits]]) -> list[RequestOutput]:
        """The batch was computed, in one or several steps: advance its requests, and give each a token."""
        self.scheduler.update(batch)
        self.stats.computed_tokens += batch.num_tokens
        return [output for part, step in steps for output in self._sample(part, step)]

    def _attribute(self, batch: Batch, seconds: float) -> None:
        """A step took `seconds`: requests without a token yet bear their share of it."""
        if self.tiers is not None:
            self.tiers.observe(batch, seconds)
        share = seconds / batch.num_tokens
        for row in batch.rows:
            request = self.scheduler.requests[row.request_id]
            if not request.output_ids:
                request.sources.computed.seconds += share * len(row.token_ids)

    def _sample(self, batch: Batch, step: StepLogits) -> list[RequestOutput]:
        requests = [self.scheduler.requests[row.request_id] for row in batch.rows if row.sample]
        eos = self.tokenizer.eos_token_ids
        rows = [SampleRow(r.params, r.prompt_ids, r.output_ids, r.seed, eos) for r in requests]
        now = time.monotonic()
        outputs = []
        for request, choice in zip(requests, sample(step.logits, rows, step.best), strict=True):
            if isinstance(choice, SampleFailure):
                self._finish(request, "error")
                outputs.append(self._output(request, TextDelta(), "error", error=choice.reason))
                continue
            request.append(choice if isinstance(choice, int) else choice.token_id)
            self._time_token(request, now)
            outputs.append(self._advance(request, request.text.push(choice)))
        return outputs

    def _advance(self, request: Request, delta: TextDelta) -> RequestOutput:
        """End the request if its text or its length says so."""
        if delta.finished_by is not None:
            self._finish(request, "stop")
            return self._output(request, delta, "stop")
        if request.num_output_tokens >= request.max_tokens:
            self._finish(request, "length")
            return self._output(request, delta + request.text.flush(), "length")
        return self._output(request, delta, None)

    def _failed(self, request: Request) -> RequestOutput:
        """For a request the scheduler has dropped after a failed step."""
        self._count_finish(request, "error")
        return self._output(request, TextDelta(), "error", error=f"the step could not be computed: {self.last_error}")

    def _output(
        self,
        request: Request,
        delta: TextDelta,
        finish_reason: FinishReason | None,
        error: str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish_reason=finish_reason,
            stop_reason=None if delta.finished_by in self.tokenizer.eos_token_ids else delta.finished_by,
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_output_tokens=request.num_output_tokens,
            sources=request.sources if finish_reason is not None else None,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request)
        self._count_finish(request, reason)

    def _count_finish(self, request: Request, reason: FinishReason) -> None:
        pinned = self.cache.pin(request.chain, request.pin_seconds) if request.pin_seconds else 0
        self.explainer.finished(request, reason, pinned)
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.stats.e2e.observe(time.monotonic() - request.arrival_time)

    def _count_admissions(self, now: float) -> None:
        for request in self.scheduler.just_admitted:
            assert request.num_cached_tokens is not None
            self.stats.queue_time.observe(now - request.arrival_time)
            request.admission_time = now
            miss = self.explainer.admitted(request, self.scheduler.running).miss
            if miss is not None:
                self.stats.missed_tokens[miss.cause] = self.stats.missed_tokens.get(miss.cause, 0) + miss.tokens
            self.stats.prompt_tokens += request.num_prompt_tokens
            self.stats.cached_tokens += request.num_cached_tokens
            if self.config.enable_prefix_caching:
                self.stats.prefix_queries += request.num_prompt_tokens
                self.stats.prefix_hits += request.sources.pool.tokens
            for name, source in request.sources.items():
                self.stats.source_tokens[name] = self.stats.source_tokens.get(name, 0) + source.tokens

    def _time_token(self, request: Request, now: float) -> None:
        self.stats.generated_tokens += 1
        if request.last_token_time is None:
            request.first_token_time = now
            self.stats.ttft.observe(now - request.arrival_time)
        else:
            self.stats.itl.observe(now - request.last_token_time)
        request.last_token_time = now

    def _update_gauges(self) -> None:
        stats, cache = self.stats, self.cache
        stats.num_running = len(self.scheduler.running)
        stats.num_waiting = len(self.scheduler.waiting)
        stats.blocks_free, stats.blocks_active, stats.blocks_cached = cache.num_free, cache.num_active, cache.num_cached
        stats.preemptions = self.scheduler.preemptions
        stats.evictions = cache.evictions
