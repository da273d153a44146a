"""From a model's name to a running engine: resolve the source, size the pool, load the weights, warm up."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anaphora import native
from anaphora.blocks.hashing import Namespace
from anaphora.engine.backend import ASKED
from anaphora.engine.config import EngineConfig, Machine, UserConfig, free_memory, resolve
from anaphora.engine.engine import Engine
from anaphora.engine.sources.resolve import ModelFolder
from anaphora.errors import ConfigError, CorruptModel
from anaphora.geometry.kv_dtype import BlockMap, kv_dtype
from anaphora.geometry.model import ModelGeometry
from anaphora.geometry.units import human_bytes

if TYPE_CHECKING:
    from anaphora.engine.models.load import LoadedModel
    from anaphora.engine.tokenizer import Tokenizer
    from anaphora.storage.calibration import Calibration
    from anaphora.storage.codec import Codec

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass
class Startup:
    """Seconds each part of the start took, for the start-up line and the benchmark."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, since: float) -> float:
        now = time.monotonic()
        self.seconds[name] = now - since
        return now


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything decided, nothing loaded."""

    config: EngineConfig
    blocks: BlockMap
    geometry: ModelGeometry
    model_config: dict[str, Any]
    chat_template: str | None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises CorruptModel with line and column."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptModel(
            f"{folder} has no config.json; give a folder with config.json, safetensors and tokenizer"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptModel(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise CorruptModel(f"{path} must hold a JSON object; fetch it again")
    return config


def prepare(folder: ModelFolder, user: UserConfig) -> Prepared:
    """Resolve every setting for the model in `folder` on this machine. Loads no weights."""
    from anaphora.engine.models.checkpoint import Checkpoint
    from anaphora.engine.models.spec import decoder_spec

    model_config = read_config(folder.path)
    geometry = ModelGeometry.from_config(model_config)
    config, blocks = resolve(
        user,
        model_path=folder.path,
        model_name=folder.name,
        model_config=model_config,
        geometry=geometry,
        num_weights=Checkpoint(folder.path, model_config).num_parameters,
        has_spec=decoder_spec(model_config, geometry) is not None,
        machine=_machine(user.device),
    )
    return Prepared(config, blocks, geometry, model_config, user.chat_template)


def load(prepared: Prepared, startup: Startup) -> Engine:
    """Load the weights, allot the pool and run one token through the model. State changes: memory."""
    from anaphora.engine.runner import ModelRunner
    from anaphora.storage.codec import VERSION
    from anaphora.storage.paged import PagedStorage

    config = prepared.config
    if config.backend == "torch" and config.device == "cpu" and config.backend_reason != ASKED:
        logger.warning("the torch backend runs, many times slower than the native one: %s", config.backend_reason)
    tokenizer, loaded = load_weights(prepared, startup)
    since = time.monotonic()
    codec, calibration = codec_of(prepared, loaded, tokenizer)
    if calibration is not None:
        since = startup.timed("calibration", since)
    storage = PagedStorage(codec, config.num_blocks, loaded.device)
    runner = ModelRunner(loaded.executor(storage), storage)
    namespace = Namespace(
        weights_digest=loaded.weights_digest,
        kv_dtype=f"{codec.name}/{VERSION}",
        layout=repr(codec.layout),
        tokenizer_digest=tokenizer.digest,
    )
    tiers = None
    if config.has_tiers:
        from anaphora.engine.tiering.open import open_tiers

        tiers = open_tiers(config, namespace, storage.data.view(-1).numpy().data)
    engine = Engine(
        config,
        codec.layout,
        runner,
        tokenizer,
        vocab_size=prepared.geometry.vocab_size,
        namespace=namespace,
        tiers=tiers,
    )
    try:
        engine.warm_up()
        engine.measure_prefill()
    except BaseException:
        engine.close()  # the folder of a disk cache is free again at once
        raise
    startup.timed("warm-up", since)
    return engine


def load_weights(prepared: Prepared, startup: Startup) -> tuple[Tokenizer, LoadedModel]:
    """State changes: memory; the threads of torch and of the native kernels."""
    import torch

    from anaphora.engine.models.load import load_model, native_module
    from anaphora.engine.tokenizer import Tokenizer

    config = prepared.config
    torch.set_num_threads(config.threads)
    if config.backend == "native":
        native_module().set_threads(config.threads)
    since = time.monotonic()
    tokenizer = Tokenizer.from_folder(config.model_path, chat_template=prepared.chat_template)
    since = startup.timed("tokenizer", since)
    loaded = load_model(
        config.model_path,
        prepared.model_config,
        prepared.geometry,
        dtype=getattr(torch, config.dtype),
        device=torch.device(config.device),
        implementation=config.implementation,
        backend=config.backend,
        max_model_len=config.max_model_len,
    )
    startup.timed("weights", since)
    return tokenizer, loaded


def codec_of(
    prepared: Prepared, loaded: LoadedModel, tokenizer: Tokenizer, calibration: Calibration | None = None
) -> tuple[Codec, Calibration | None]:
    """The codec, and the model's calibration where it rests on one; given, it is not made anew."""
    from anaphora.engine.calibration import calibration_of
    from anaphora.storage.codec import Codec

    codec = Codec(prepared.blocks.dtype, prepared.blocks.layout)
    if not codec.calibrated:
        return codec, calibration
    calibration = calibration or calibration_of(loaded, tokenizer, prepared.geometry, loaded.device)
    return Codec(codec.dtype, codec.layout, calibration), calibration


def allotment(prepared: Prepared) -> list[tuple[str, str]]:
    """What the memory went to, as (label, value) lines: weights, KV per token, pool, requests at full length."""
    config, layout = prepared.config, prepared.blocks.layout
    tokens = config.num_blocks * config.block_size // len(layout.groups)
    per_request = layout.blocks_for(config.max_model_len, config.max_num_batched_tokens)
    return [
        ("model", f"{config.model_name} ({prepared.geometry.architecture})"),
        ("dtype", f"{config.dtype} on {config.device} ({config.dtype_reason})"),
        ("backend", f"{config.backend}, {_count(config.threads, 'thread')} ({config.backend_reason})"),
        ("weights", f"{config.weight_bytes:,} bytes ({human_bytes(config.weight_bytes)})"),
        (
            "KV per token",
            f"{config.bytes_per_token:,} bytes ({human_bytes(config.bytes_per_token)}) as {config.kv_cache_dtype}",
        ),
        ("KV pool", f"{config.kv_bytes:,} bytes ({human_bytes(config.kv_bytes)})"),
        *_gain(prepared),
        *_tiers(config),
        ("blocks", f"{config.num_blocks:,} of {config.block_size} tokens = {tokens:,} tokens"),
        (
            "requests",
            f"{config.num_blocks // per_request:,} at the full {config.max_model_len:,} tokens; "
            f"at most {config.max_num_seqs} run at once",
        ),
    ]


def _gain(prepared: Prepared) -> list[tuple[str, str]]:
    """What another type than bf16 makes of the same memory."""
    bf16 = BlockMap(prepared.blocks.layout, kv_dtype("bf16")).block_bytes
    if bf16 == prepared.blocks.block_bytes:
        return []
    return [("KV type", f"{bf16 / prepared.blocks.block_bytes:.2f}x the tokens of bf16 in the same memory")]


def _tiers(config: EngineConfig) -> list[tuple[str, str]]:
    """The lines of the tiers behind the pool."""
    lines = []
    if config.ram_cache:
        lines.append(("RAM cache", f"{config.ram_cache:,} bytes ({human_bytes(config.ram_cache)})"))
    if config.disk_cache:
        size = human_bytes(config.disk_cache_bytes)
        lines.append(("disk cache", f"{config.disk_cache_bytes:,} bytes ({size}) in {config.disk_cache}"))
    if config.remote_cache:
        lines.append(("remote cache", str(config.shown()["remote_cache"])))
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _machine(asked: str) -> Machine:
    """Look at the device. Raises ConfigError when it is not here."""
    import torch

    if asked not in ("auto", "cpu") and not asked.startswith("cuda"):
        raise ConfigError(f"--device is {asked!r}; it must be auto, cpu or cuda")
    cuda = torch.cuda.is_available()
    threads = min(native.threads(), torch.get_num_threads())  # torch's default follows OMP_NUM_THREADS
    if asked.startswith("cuda") and not cuda:
        raise ConfigError(
            "--device cuda: torch sees no CUDA device here; use --device cpu or install a CUDA build of torch"
        )
    if asked == "cpu" or not cuda:
        fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return Machine("cpu", fast, free_memory(), threads, native.missing() or "")
    device = "cuda" if asked == "auto" else asked
    return Machine(device, True, int(torch.cuda.mem_get_info(device)[0]), threads)
