"""What a stored form of keys and values costs in bytes and in quality, against bfloat16, on one model.

    python benchmarks/formats.py FOLDER [--only int8,int4] [--errors] [--threads 2] [--out formats.json]

Teacher-forced on four texts of 1,024 tokens (benchmarks/texts: a story and Chinese of our own, a page of the docs, a
file of the source), computed in float32 with keys and values passed through the real encoder and decoder of each
format. The reference keeps bfloat16. Mean KL in nats per token with a 95 % interval (bootstrap over stretches of 128
tokens), its 99th percentile, agreement of the likeliest token. `--errors` prints the fast study instead: the error that
each setting leaves in attention outputs, near by and far into the context, including ways that were left.

llama.cpp's q8_0 and q4_0 (with its Hadamard rotation) are emulated here: its block of 32, float16 scale and rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anaphora.engine.models.compact import CompactDecoder
from anaphora.engine.models.load import load_model
from anaphora.engine.tokenizer import Tokenizer
from anaphora.geometry.kv_dtype import NAMES
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.storage.calibration import PLACES, Calibration, Calibrator
from anaphora.storage.calibration_text import TEXT
from anaphora.storage.codec import Codec, codec_for
from anaphora.storage.formats.base import Format
from anaphora.storage.transform import spread

TEXTS = Path(__file__).parent / "texts"
LENGTH = 1024
STRETCH = 128

Keep = Callable[[int, Tensor], Tensor]
"""(layer, keys or values [T, kv_heads, dim]) -> what is read back."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to keep keys and values."""

    name: str
    bits: float
    """Per element, keys and values together, scales counted."""
    keys: Keep
    values: Keep


@dataclass(frozen=True, slots=True)
class Model:
    decoder: CompactDecoder
    geometry: ModelGeometry
    layout: CacheLayout
    tokens: Tensor
    text: list[int]
    """The built-in calibration text."""

    @classmethod
    def load(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text())
        geometry = ModelGeometry.from_config(config)
        loaded = load_model(folder, config, geometry, dtype=torch.float32, device=torch.device("cpu"))
        if not isinstance(loaded.decoder, CompactDecoder):
            raise SystemExit("this study needs a model that the compact decoder runs")
        tokenizer = Tokenizer.from_folder(folder)
        ids = [tokenizer.encode(path.read_text())[:LENGTH] for path in sorted(TEXTS.glob("*.txt"))]
        if any(len(text) < LENGTH for text in ids):
            raise SystemExit(f"a text has fewer than {LENGTH} tokens under this tokenizer")
        tokens = torch.tensor(ids).flatten()
        return cls(loaded.decoder, geometry, CacheLayout.of(geometry, 16), tokens, tokenizer.encode(TEXT))

    def calibration(self, places: Sequence[float] = PLACES) -> Calibration:
        layers = len(self.geometry.layers)
        calibrator = Calibrator(self.text, self.geometry.max_position, layers, self.layout.kv_heads, places)
        self.decoder.forward(calibrator.token_ids, calibrator.positions, calibrator)
        return calibrator.result()

    def forward(self, attend: Any, offset: int = 0) -> Tensor:
        positions = torch.arange(LENGTH).repeat(len(self.tokens) // LENGTH) + offset
        return self.decoder.forward(self.tokens, positions, attend)


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Causal, text by text and head by head."""
    out = torch.empty_like(query)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    per_head = query.shape[1] // keys.shape[1]
    for begin in range(0, len(query), LENGTH):
        here = slice(begin, begin + LENGTH)
        for head in range(query.shape[1]):
            scores = query[here, head] @ keys[here, head // per_head].T * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
            out[here, head] = weights @ values[here, head // per_head]
    return out


class Through:
    """`attend` with keys and values passed through a setting."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **rest: Any) -> Tensor:
        keys, values = self._setting.keys(layer, key), self._setting.values(layer, value)
        return attention(query, keys, values, scale, rest.get("softcap"))


def passed(form: Format, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1).float()
    return form.decode(*form.encode(flat), x.shape[-1]).view(x.shape)


def ours(name: str, model: Model, calibration: Calibration | None, label: str = "") -> Setting:
    codec = codec_for(name, model.layout, calibration=calibration)

    def keys(layer: int, x: Tensor) -> Tensor:
        of, transform = codec.layer(layer), codec.layer(layer).key_transform
        if transform is None:
            return passed(of.key, x)
        kept = passed(of.key, transform.of_keys(x))
        return torch.einsum("the,hde->thd", kept, transform.queries) + transform.mean

    def values(layer: int, x: Tensor) -> Tensor:
        of, transform = codec.layer(layer), codec.layer(layer).value_transform
        return (
            passed(of.value, x) if transform is None else transform.of_output(passed(of.value, transform.of_values(x)))
        )

    return Setting(label or name, bits(codec), keys, values)


def bits(codec: Codec) -> float:
    layout = codec.layout
    elements = layout.kv_heads * (layout.key_dim + layout.value_dim) * sum(len(g.layers) for g in layout.groups)
    return codec.bytes_per_token * 8 / elements


def both(name: str, width: float, keep: Callable[[Tensor], Tensor], *, rotated: bool) -> Setting:
    """The same for keys and values, with nothing known of the model."""

    def run(layer: int, x: Tensor) -> Tensor:
        if not rotated:
            return keep(x)
        turn = spread(x.shape[-1]).float()
        return keep(x @ turn) @ turn.T

    return Setting(name, width, run, run)


def q8_0(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (-1, 32))  # type: ignore[no-untyped-call]
    size = parts.abs().amax(-1, keepdim=True) / 127
    codes = (parts * torch.where(size > 0, 1 / size, 0.0)).round()
    kept: Tensor = (codes * size.half().float()).flatten(-2)
    return kept


def q4_0(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (-1, 32))  # type: ignore[no-untyped-call]
    size = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)) / -8
    codes = (parts * torch.where(size != 0, 1 / size, 0.0) + 8.5).floor().clamp(0, 15) - 8
    kept: Tensor = (codes * size.half().float()).flatten(-2)
    return kept


def absmax(width: int, group: int) -> Callable[[Tensor], Tensor]:
    def keep(x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (-1, group))  # type: ignore[no-untyped-call]
        scale = (parts.abs().amax(-1, keepdim=True) / (2 ** (width - 1) - 1)).half().float().clamp_min(2**-24)
        kept: Tensor = ((parts / scale).round() * scale).flatten(-2)
        return kept

    return keep


def fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def by_channel(width: int, tokens: int = 32) -> Callable[[Tensor], Tensor]:
    """KIVI's keys: an offset and a scale per channel of a block of tokens. Not stateless per token: to compare with."""

    def keep(x: Tensor) -> Tensor:
        parts = x.unflatten(0, (-1, tokens))  # type: ignore[no-untyped-call]
        low = parts.amin(1, keepdim=True).half().float()
        scale = ((parts.amax(1, keepdim=True) - low) / (2**width - 1)).half().float().clamp_min(2**-24)
        kept: Tensor = (((parts - low) / scale).round().clamp(0, 2**width - 1) * scale + low).flatten(0, 1)
        return kept

    return keep


def settings(model: Model, *, wide_study: bool) -> list[Setting]:
    calibration = model.calibration()
    grouped = both("", 0, absmax(4, 32), rotated=True)
    kivi = Setting("int4 keys per channel of 32 tokens", 4.75, lambda _, x: by_channel(4)(x), grouped.values)
    every = [
        *(ours(name, model, calibration) for name in NAMES if name not in ("fp32", "fp16")),
        both("q8_0, rotated (llama.cpp, emulated)", 8.5, q8_0, rotated=True),
        both("q4_0, rotated (llama.cpp, emulated)", 4.5, q4_0, rotated=True),
        *(ours(name, model, None, f"{name}, not calibrated") for name in ("fp8_e4m3", "int8", "int4")),
        both("fp8_e4m3, bare cast", 8, fp8, rotated=False),
        both("int8 per token and head", 8.25, absmax(8, model.layout.key_dim), rotated=False),
        both("int4 groups of 32", 4.5, absmax(4, 32), rotated=False),
        kivi,
    ]
    if wide_study:
        first = model.calibration([0.0])
        every += [ours(name, model, first, f"{name}, calibrated at 0..511") for name in ("int8", "int4")]
        every += [both(f"int4 groups of {n}, rotated", 4 + 16 / n, absmax(4, n), rotated=True) for n in (32, 16)]
        every += [both("int8 per token and head, rotated", 8.25, absmax(8, model.layout.key_dim), rotated=True)]
    return every


class Errors:
    """`attend` that only looks: the relative squared error that keys alone, and values alone, leave in the outputs.

    One text in every third layer. (The plain error of keys, or of scores, misleads: most attention goes to few tokens.)
    """

    def __init__(self, every: Sequence[Setting]) -> None:
        self._every = every
        self.of_keys = {setting.name: 0.0 for setting in every}
        self.of_values = {setting.name: 0.0 for setting in every}
        self.layers = 0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **rest: Any) -> Tensor:
        softcap = rest.get("softcap")
        exact = attention(query, key, value, scale, softcap)
        if layer % 3 == 0:
            self.layers += 1
            begin = layer // 3 * LENGTH % len(query)
            q, k, v, out = (x[begin : begin + LENGTH] for x in (query, key, value, exact))
            for setting in self._every:
                for sums, keys, values in (
                    (self.of_keys, setting.keys(layer, k), v),
                    (self.of_values, k, setting.values(layer, v)),
                ):
                    lost = attention(q, keys, values, scale, softcap) - out
                    sums[setting.name] += float(lost.square().sum() / out.square().sum())
        return exact


def study_errors(model: Model, every: Sequence[Setting]) -> list[dict[str, Any]]:
    far = (model.geometry.max_position or 2 * LENGTH) - LENGTH
    near_by, far_off = Errors(every), Errors(every)
    model.forward(near_by)
    model.forward(far_off, far)
    print(f"| setting | bits | keys | keys from position {far:,} on | values |\n|---|---|---|---|---|")
    rows = []
    for setting in every:
        name, layers = setting.name, near_by.layers
        row = [sums[name] / layers for sums in (near_by.of_keys, far_off.of_keys, near_by.of_values)]
        print(f"| {name} | {setting.bits:.2f} | {row[0]:.2e} | {row[1]:.2e} | {row[2]:.2e} |", flush=True)
        rows.append({"setting": name, "bits": setting.bits, "keys": row[0], "keys_far": row[1], "values": row[2]})
    return rows


@dataclass(frozen=True, slots=True)
class Quality:
    setting: str
    bits: float
    gain: float
    """Tokens per GiB against bfloat16."""
    mean: float
    interval: tuple[float, float]
    p99: float
    top1: float
    by_text: dict[str, float]
    seconds: float


def study_quality(model: Model, every: Sequence[Setting]) -> list[Quality]:
    reference = model.forward(Through(next(s for s in every if s.name == "bf16")))
    print("| setting | bits | tokens per GiB | mean KL | 95 % | p99 | top-1 |\n|---|---|---|---|---|---|---|")
    rows = []
    for setting in every:
        since = time.perf_counter()
        if setting.name == "bf16":  # against the true numbers: the floor of noise
            hidden = model.forward(Through(Setting("", 0, lambda _, x: x, lambda _, x: x)))
        else:
            hidden = model.forward(Through(setting))
        rows.append(_quality(model, setting, reference, hidden, time.perf_counter() - since))
        row = rows[-1]
        print(
            f"| {row.setting} | {row.bits:.2f} | {row.gain:.2f}x | {row.mean:.5f} | {row.interval[0]:.5f} .. "
            f"{row.interval[1]:.5f} | {row.p99:.4f} | {row.top1:.1%} |",
            flush=True,
        )
    return rows


def _quality(model: Model, setting: Setting, reference: Tensor, hidden: Tensor, seconds: float) -> Quality:
    divergences, agreed = [], []
    for begin in range(0, len(hidden), 256):
        here = slice(begin, begin + 256)
        wanted, got = (model.decoder.logits(h[here]).log_softmax(-1) for h in (reference, hidden))
        divergences.append((wanted.exp() * (wanted - got)).sum(-1))
        agreed.append(wanted.argmax(-1) == got.argmax(-1))
    kl = torch.cat(divergences)
    stretches = kl.view(-1, STRETCH).mean(1)
    draws = torch.randint(len(stretches), (2000, len(stretches)), generator=torch.Generator().manual_seed(0))
    low, high = stretches[draws].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    names = [path.stem for path in sorted(TEXTS.glob("*.txt"))]
    by_text = dict(zip(names, kl.view(-1, LENGTH).mean(1).tolist(), strict=True))
    top1 = float(torch.cat(agreed).float().mean())
    p99 = float(kl.quantile(0.99))
    assert math.isfinite(p99)
    return Quality(
        setting.name, setting.bits, 16 / setting.bits, float(kl.mean()), (low, high), p99, top1, by_text, seconds
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names of settings, with commas; bf16 is always there")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = Model.load(options.folder)
    every = settings(model, wide_study=options.errors)
    if options.only:
        wanted = {"bf16", *options.only.split(",")}
        every = [setting for setting in every if setting.name in wanted]
    if options.errors:
        rows: list[Any] = study_errors(model, every)
    else:
        rows = [asdict(row) for row in study_quality(model, every)]
    if options.out:
        options.out.write_text(json.dumps({"model": str(options.folder), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
