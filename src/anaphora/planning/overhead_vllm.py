"""What vLLM takes before KV: available = total x utilisation - weights - activation peak - non-torch - graphs.

The rule is vLLM's determine_available_memory (v1/worker/gpu_worker.py): it runs one dummy batch of
max_num_batched_tokens, then a dummy sampler over max_num_seqs rows of logits, and takes the peak of both. Until 0.20
CUDA graphs were captured on top of the share; since 0.21 an estimate of them comes out of it.

Constants that no source states were read off public start-up logs; each says how many and how far they spread.
"""

from __future__ import annotations

from anaphora.planning.overhead import (
    GIB,
    MIB,
    Budget,
    Estimate,
    Part,
    Situation,
    activation_per_token,
    device_spread,
    weight_estimate,
)
from anaphora.planning.protocol import EngineSettings

NEWEST = (0, 33)
_SHARE_092 = (0, 22)
_GRAPHS_INSIDE = (0, 21)
_NO_SORT = (0, 14)
_V1 = (0, 8)
_SORT_BYTES = 38.4
"""A logit's bytes in the sampler while it sorted every row: 2 bf16 + 4 float32 + 4 sorted + 8 indices, and PyTorch's
full sort keeps two arrays of (segment, index) pairs of 8 bytes and a radix scratch. Sixteen logs from 0.6 to 0.13 show
38.3-38.5 (for example 5.58 GiB for 1,024 rows of 151,936 and 8,192 hidden states)."""
_DIRECT_BYTES = 14
"""Without the sort: 2 bf16 + 4 float32 + 4 probabilities + 4 exponential noise (v1/sample/ops/topk_topp_sampler.py)."""
_LARGE = 70 * GIB
_ENCODER, _ENCODER_HIGH = GIB // 2, 3 * GIB
"""The dummy run of an image encoder: 0.3 GiB (LLaVA-1.5) to 3 GiB (Qwen3.x) beside the text model's in 4 logs; it
depends on the processor's largest image, which a config does not hold."""
_WHOLE_PREFILL_LIMIT = 32768
"""V0 prefills a prompt whole up to this max_model_len, and profiles that length."""


def default_utilization(version: tuple[int, int] | None) -> float:
    """gpu_memory_utilization's default."""
    return 0.92 if (version or NEWEST) >= _SHARE_092 else 0.9


def default_max_num_seqs(settings: EngineSettings, version: tuple[int, int] | None) -> int:
    """`vllm serve`'s max_num_seqs: 256, and 1,024 on devices of 70 GiB and more (not A100) since V1."""
    if settings.device == "cpu":
        return 128 * settings.tensor_parallel_size * settings.pipeline_parallel_size
    large = settings.device_memory_bytes >= _LARGE and settings.compute_capability != 80
    return 1024 if large and (version or NEWEST) >= _V1 else 256


def default_batched_tokens(settings: EngineSettings, version: tuple[int, int] | None) -> int:
    """`vllm serve`'s max_num_batched_tokens, by version and device. V0 without chunking: max_model_len."""
    current = version or NEWEST
    if current < _V1:
        return settings.max_model_len if settings.max_model_len <= _WHOLE_PREFILL_LIMIT else 2048
    if settings.device == "cpu":
        return 2048 * settings.tensor_parallel_size * settings.pipeline_parallel_size
    if settings.device_memory_bytes >= 160 * GIB and current >= (0, 14):
        return 16384
    return 8192 if settings.device_memory_bytes >= _LARGE and settings.compute_capability != 80 else 2048


def default_batch(settings: EngineSettings, version: tuple[int, int] | None) -> int:
    """The default of a step, which holds a token of every sequence at least."""
    return max(default_batched_tokens(settings, version), settings.max_num_seqs or 1)


def vllm_budget(situation: Situation) -> Budget:
    """One device's memory under vLLM. Raises UnsupportedModel."""
    settings, version = situation.settings, situation.version or NEWEST
    share = situation.utilization or default_utilization(version)
    parts = [
        Part("weights", weight_estimate(situation)),
        Part("activations", _activations(situation, version)),
        Part("libraries", _libraries(situation, version)),
    ]
    if not situation.eager and settings.device != "cpu":
        parts.append(Part("CUDA graphs", _graphs(situation, version), inside=version >= _GRAPHS_INSIDE))
    total = situation.memory_bytes
    return Budget(
        total, int(total * share), f"{total / GIB:.2f} GiB x {share:g}", tuple(parts), device_spread(situation.device)
    )


def _activations(situation: Situation, version: tuple[int, int]) -> Estimate:
    """The larger of a forward pass over one batch and the sampler over max_num_seqs rows."""
    geometry, settings = situation.geometry, situation.settings
    batch = settings.max_num_batched_tokens or default_batched_tokens(settings, version)
    rows = min(settings.max_num_seqs or default_max_num_seqs(settings, version), batch)
    forward = batch * activation_per_token(geometry, settings.tensor_parallel_size, settings.model_dtype_bytes)
    per_logit = _SORT_BYTES if version < _NO_SORT else _DIRECT_BYTES
    sampler = int(rows * geometry.vocab_size * per_logit) + batch * geometry.hidden_size * settings.model_dtype_bytes
    likely = max(forward, sampler)
    source = f"a batch of {batch:,} tokens: {forward / MIB:,.0f} MiB; sampling {rows:,} rows: {sampler / MIB:,.0f} MiB"
    experts = geometry.parameters is not None and geometry.parameters.experts > 0
    high = max(likely * 1.15, forward * (1.6 if experts else 1.15)) + 128 * MIB
    low = 0.8 * likely
    if version >= _NO_SORT:  # FlashInfer or Triton sampling, or neither
        high = max(high, rows * geometry.vocab_size * 20 + 256 * MIB)
    if geometry.parameters is not None and geometry.parameters.vision:
        likely, high = max(likely, _ENCODER), max(high, likely + _ENCODER_HIGH)
        source += "; profiling the image encoder: 0.1-3 GiB"
    return Estimate(likely, int(low), int(high), source)


def _libraries(situation: Situation, version: tuple[int, int]) -> Estimate:
    """CUDA context growth, kernels and NCCL's buffers.

    One device: 0.02 GiB on Ada cards, 0.07-0.14 on Hopper, 0.1-0.35 and once 1.8 under V0 (17 logs).
    Several: NCCL and custom all-reduce, 0.25-1.4 GiB (5 logs).
    """
    if situation.ranks > 1:
        return Estimate(int(0.55 * GIB), int(0.25 * GIB), int(1.4 * GIB), "NCCL and kernels, 0.25-1.4 GiB in 5 logs")
    if version < _V1:
        return Estimate(int(0.25 * GIB), int(0.05 * GIB), int(1.8 * GIB), "libraries under V0, 0.1-1.8 GiB in 5 logs")
    hopper = situation.settings.compute_capability >= 90
    likely = 0.13 if hopper else 0.05
    return Estimate(int(likely * GIB), int(0.01 * GIB), int(0.45 * GIB), "libraries, 0.02-0.14 GiB in 12 logs")


def _graphs(situation: Situation, version: tuple[int, int]) -> Estimate:
    """CUDA graphs. Captured: median 0.46 GiB, mostly 0.1-1.3, more with more layers and ranks (33 logs).

    The estimate that 0.21 and later take off the share was 0.13-0.22 GiB in four logs and 0.9-1.4 for one model.
    """
    if version >= _GRAPHS_INSIDE:
        return Estimate(int(0.2 * GIB), int(0.05 * GIB), int(1.4 * GIB), "vLLM's own estimate, 0.13-1.4 GiB in 6 logs")
    return Estimate(int(0.46 * GIB), int(0.05 * GIB), int(2.3 * GIB), "median of 33 logs; on top of the share")
