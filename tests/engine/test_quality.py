"""The study of stored forms: its figures against what one computes by hand, its prompts, its memory."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from anaphora.engine.config import UserConfig
from anaphora.engine.quality.lockstep import first_differences, read
from anaphora.engine.quality.opening import Opened, open_model
from anaphora.engine.quality.prompts import DEPTHS, built_in, own, questions
from anaphora.engine.quality.study import Study
from anaphora.engine.sources.resolve import resolve_model
from anaphora.errors import AnaphoraError, ConfigError
from anaphora.storage.calibration_text import TEXT
from support.models import tiny_llama

DATA = Path(__file__).parents[1] / "data" / "kv_quality.json"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANAPHORA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        folder = tiny_llama(tmp_path_factory.mktemp("tiny"), head_dim=16)
        user = UserConfig(dtype="float32", device="cpu", kv_memory=64 << 20)
        return open_model(resolve_model(str(folder)), user, ["int8", "int4", "fp32"])


def silent(_tokens: int) -> None:
    """Nobody watches."""


def test_divergence_is_that_of_the_definition_whatever_the_chunks(opened: Opened) -> None:
    tokens = list(b"A quick brown fox jumps over two lazy dogs, then sleeps.")
    names = [subject.name for subject in opened.subjects]
    whole = [subject.open(1, 64).step([tokens], 0, every=True).logits.double() for subject in opened.subjects]
    following = torch.tensor(tokens[1:])
    for begin, chunk in ((1, 64), (1, 16), (20, 16), (33, 7)):
        scores, after = read([s.open(1, 64) for s in opened.subjects], names, tokens, begin, chunk, silent)
        reference = whole[0].log_softmax(-1)
        for logits, found, last in zip(whole, scores, after, strict=True):
            ours = logits.log_softmax(-1)
            kl = (reference.exp() * (reference - ours)).sum(-1)[begin - 1 : -1]
            surprise = -ours[:-1].gather(-1, following[:, None])[:, 0][begin - 1 :]
            np.testing.assert_allclose(found.kl, kl.numpy(), rtol=0.02, atol=1e-5)
            np.testing.assert_allclose(found.surprise, surprise.numpy(), rtol=1e-3, atol=1e-3)
            assert last == int(logits[-1].argmax())
            assert len(found.same) == len(found.right) == len(tokens) - begin


def test_the_first_difference_is_where_free_generation_parts(opened: Opened) -> None:
    prompts = [list(f"Tell me about {what} and why it".encode()) for what in ("tea", "rust", "Rome", "salt", "moss")]
    seen = set()
    for prompt in prompts:
        free = []
        for subject in opened.subjects:
            sequences = subject.open(1, 96)
            path = [sequences.prefill(prompt, 64)]
            for at in range(23):
                path.append(int(sequences.step([path[-1:]], len(prompt) + at).logits[0].argmax()))
            free.append(path)
        forms = [subject.open(1, 96) for subject in opened.subjects]
        _, after = read(forms, ["form"] * len(forms), prompt, 1, 64, silent)
        found = first_differences(forms, after, len(prompt), 24, (), silent)
        for path, difference in zip(free, found, strict=True):
            parted = (at for at, (ours, theirs) in enumerate(zip(path, free[0], strict=True)) if ours != theirs)
            assert difference == next(parted, None)
        seen.update(found)
    assert len(seen) > 1  # some part, or this proves little


def test_a_study_of_a_tiny_model(opened: Opened) -> None:
    said: list[tuple[str, int, int | None]] = []
    prompts, asked = built_in(opened.tokenizer, 200), questions(opened.tokenizer, 200)
    study = Study(opened, prompts, asked, 6)
    result = study.run(lambda *step: said.append(step), opened.subjects[2])
    reference, int8, int4, fp32 = result.forms
    assert [form.name for form in result.forms] == ["bf16", "int8", "int4", "fp32"]
    assert reference.scores.kl.max() == 0
    assert 0 < fp32.scores.kl.mean() < int8.scores.kl.mean() < int4.scores.kl.mean()
    assert int8.scores.same.mean() > int4.scores.same.mean()
    for form in result.forms:
        assert len(form.scores.kl) == len(result.text) == len(result.position) == 8 * 199
        assert len(form.first_difference) == 8
        assert len(form.answered) == len(form.surprises) == len(DEPTHS)
        assert form.speed is not None
        assert form.speed.decode_tokens_per_second > 0
    sums, counts = result.by_text(int8.scores.kl)
    assert sums.sum() == pytest.approx(int8.scores.kl.sum(), rel=1e-4)
    assert counts.sum() == len(result.text)
    by_layer = result.skipped["int4"]
    assert len(by_layer) == 2
    assert min(by_layer) < result.skipped_baseline["int4"]
    assert list(dict.fromkeys(stage for stage, _, _ in said)) == [
        "reading texts",
        "asking questions",
        "measuring speed",
        "int4, layer by layer",
    ]
    for (stage, done, total), (next_stage, next_done, _) in pairwise(said):
        assert total is not None
        assert done <= total
        assert next_stage != stage or next_done >= done


def test_built_in_prompts_fill_the_context_and_repeat_nothing(opened: Opened) -> None:
    prompts = built_in(opened.tokenizer, 3000)
    assert len({prompt.name for prompt in prompts}) == len(prompts) == 8
    assert {stretch.kind for prompt in prompts for stretch in prompt.stretches} == {"english", "chinese", "code"}
    for prompt in prompts:
        assert len(prompt.token_ids) == 3000
        assert [stretch.begin for stretch in prompt.stretches[1:]] == [s.end for s in prompt.stretches[:-1]]
        assert prompt.stretches[0].begin == 0
        assert prompt.stretches[-1].end == 3000
        text = opened.tokenizer.decode(prompt.token_ids)
        assert not any(line in TEXT for line in text.splitlines() if len(line) > 20)
    longest = built_in(opened.tokenizer, 1 << 20)
    assert len({len(prompt.token_ids) for prompt in longest}) == 1


def test_questions_hold_the_fact_at_its_depth(opened: Opened) -> None:
    asked = questions(opened.tokenizer, 1000)
    assert [question.depth for question in asked] == list(DEPTHS)
    for question in asked:
        assert len(question.token_ids) == 1000
        text = opened.tokenizer.decode(question.token_ids)
        answer = opened.tokenizer.decode(question.token_ids[-question.answer_tokens :]).strip()
        fact = text.index(f" is {answer}.")
        assert text.count(answer) == 2
        assert text.endswith(answer)
        assert fact / len(text) == pytest.approx(question.depth, abs=0.1)
    assert questions(opened.tokenizer, 100) == []


def test_own_prompts_are_cut_to_the_context(opened: Opened, tmp_path: Path) -> None:
    opened.tokenizer._templates["default"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "0123456789" * 3}]
    found = own([{"messages": chat}], opened.tokenizer, 20)
    assert [len(prompt.token_ids) for prompt in found] == [20]
    assert found[0].stretches[0].kind == "own"
    with pytest.raises(ConfigError, match="prompt 1 has fewer than two tokens"):
        own([{"messages": [{"role": "user", "content": "a"}]}], opened.tokenizer, 20)


def test_what_cannot_be_measured_is_refused(opened: Opened) -> None:
    folder = resolve_model(str(opened.prepared.config.model_path))
    user = UserConfig(dtype="float32", device="cpu", kv_memory=64 << 20)
    with pytest.raises(ConfigError, match="nothing to compare with bf16"):
        open_model(folder, user, ["bf16", "bfloat16"])
    with pytest.raises(ConfigError, match="did you mean int8"):
        open_model(folder, user, ["int81"])
    small = open_model(folder, UserConfig(dtype="float32", device="cpu", kv_memory=200_000), ["int8"])
    with pytest.raises(ConfigError, match=r"Lower --context"):
        Study(small, built_in(small.tokenizer, 500), (), 8)


def test_nan_is_never_a_figure(opened: Opened) -> None:
    class Broken:
        def step(self, *_: object, **__: object) -> object:
            return type("Logits", (), {"logits": torch.full((4, 257), torch.nan)})

    with pytest.raises(AnaphoraError, match="with keys and values as fp16 the model computes NaN"):
        read([Broken()], ["fp16"], [1, 2, 3, 4], 1, 16, silent)  # type: ignore[list-item]


@pytest.mark.model
def test_smollm2_loses_what_it_lost_before(smollm2: Path) -> None:
    """By `anaphora quality smollm2-135m --backend torch --context 128 --greedy-tokens 16 --output FILE`.

    Tolerance: 25 % of the mean KL and 1 percentage point of agreement, for other processors and thread counts.
    """
    before = {form["name"]: form for form in json.loads(DATA.read_text(encoding="utf-8"))["forms"]}
    user = UserConfig(dtype="float32", device="cpu", backend="torch", kv_memory=512 << 20)
    model = open_model(resolve_model(str(smollm2)), user, ["int8", "k8v4", "int4"])
    names = [subject.name for subject in model.subjects]
    forms = [subject.open(1, 128) for subject in model.subjects]
    found = [read(forms, names, prompt.token_ids, 1, 128, silent)[0] for prompt in built_in(model.tokenizer, 128)]
    for number, name in enumerate(names[1:], 1):
        kl = np.concatenate([scores[number].kl for scores in found]).mean()
        same = np.concatenate([scores[number].same for scores in found]).mean()
        assert kl == pytest.approx(before[name]["mean_kl"]["estimate"], rel=0.25)
        assert same == pytest.approx(before[name]["agreement"]["estimate"], abs=0.01)
