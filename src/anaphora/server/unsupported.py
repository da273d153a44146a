"""Fields of other servers' APIs that would change the answer here and are not supported.

None is ever ignored in silence: a value that asks for nothing special passes (null, or one that is listed),
any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from anaphora.errors import InvalidRequest, UnsupportedField


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused and what to do; `neutral` values change nothing and pass."""

    advice: str
    neutral: tuple[object, ...] = ()

    def passes(self, value: object) -> bool:
        """Equal to a neutral value; true and false are no numbers here."""
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)


_TOOLS = Refusal('Tool calls are not parsed here; leave it out, or set `tool_choice` to "none".', ([], "none", "auto"))
_GUIDED = Refusal("Output cannot be constrained to a grammar or schema here; ask for the format in the prompt.")
_MEDIA = Refusal("This server reads and writes text only; leave it out.")
_SEARCH = Refusal("Beam search is not offered; use `n` with `temperature`.", (False,))
_TEMPLATE = Refusal("The model's own chat template is used; pass variables for it in `chat_template_kwargs`.")
_REASONING = Refusal("How long a model thinks is set through `chat_template_kwargs`, if its template offers it.")
_SAMPLER = Refusal("This way of sampling is not offered; use temperature, top_p, top_k or min_p.")
_ADAPTER = Refusal("Adapters are not served; merge it into the model's weights.")
_OUTPUT = Refusal("The answer cannot be given in this form; leave it out.", (False,))

UNSUPPORTED: Mapping[str, Refusal] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "response_format": Refusal(_GUIDED.advice, ({"type": "text"},)),
    "structured_outputs": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_decoding_backend": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "grammar": _GUIDED,
    "json_schema": _GUIDED,
    "regex": _GUIDED,
    "ebnf": _GUIDED,
    "audio": _MEDIA,
    "modalities": Refusal(_MEDIA.advice, (["text"],)),
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "images": _MEDIA,
    "prediction": Refusal("Predicted outputs are not offered; leave it out."),
    "web_search_options": Refusal("This server does not search the web; leave it out."),
    "documents": Refusal("Put the documents into the messages."),
    "moderation": Refusal("Answers are not moderated here; leave it out."),
    "reasoning": _REASONING,
    "reasoning_effort": _REASONING,
    "include_reasoning": _REASONING,
    "thinking": _REASONING,
    "enable_thinking": _REASONING,
    "thinking_token_budget": _REASONING,
    "verbosity": Refusal("Ask for it in the prompt."),
    "chat_template": _TEMPLATE,
    "add_special_tokens": Refusal("The chat template writes the special tokens itself.", (False,)),
    "suffix": Refusal("Filling in the middle is not offered; write the model's own markers into the prompt.", ("",)),
    "echo": Refusal("Only /v1/completions can repeat the prompt.", (False,)),
    "prompt_logprobs": Refusal("Log probabilities are given for produced tokens only; use `logprobs`."),
    "allowed_token_ids": Refusal("Use `logit_bias`.", ([],)),
    "bad_words": Refusal("Use `logit_bias` with -100.", ([],)),
    "use_beam_search": _SEARCH,
    "length_penalty": Refusal(_SEARCH.advice, (1.0,)),
    "early_stopping": _SEARCH,
    "best_of": Refusal("Use `n`.", (1,)),
    "typical_p": _SAMPLER,
    "tfs_z": _SAMPLER,
    "top_a": _SAMPLER,
    "mirostat": Refusal(_SAMPLER.advice, (0,)),
    "mirostat_tau": _SAMPLER,
    "mirostat_eta": _SAMPLER,
    "dry_multiplier": _SAMPLER,
    "xtc_probability": _SAMPLER,
    "dynatemp_range": _SAMPLER,
    "logits_processors": _SAMPLER,
    "repeat_penalty": Refusal("Use `repetition_penalty`."),
    "num_predict": Refusal("Use `max_tokens`."),
    "n_predict": Refusal("Use `max_tokens`."),
    "max_new_tokens": Refusal("Use `max_tokens`."),
    "truncate_prompt_tokens": Refusal("Prompts are never cut; shorten it."),
    "spaces_between_special_tokens": Refusal("Text is given as the tokenizer writes it.", (True,)),
    "lora": _ADAPTER,
    "lora_path": _ADAPTER,
    "lora_request": _ADAPTER,
    "priority": Refusal("Requests are served in the order in which they come.", (0,)),
    "cache_prompt": Refusal("Caching is set for the whole server with --enable-prefix-caching.", (True,)),
    "return_token_ids": _OUTPUT,
    "return_tokens_as_token_ids": _OUTPUT,
    "kv_transfer_params": Refusal("KV is not handed over between servers; leave it out."),
    "vllm_xargs": Refusal("They belong to vLLM; leave it out."),
    "refusal": Refusal("Put the text into `content`."),
    "annotations": Refusal("Put the text into `content`.", ([],)),
    "image_url": _MEDIA,
    "input_audio": _MEDIA,
    "file": _MEDIA,
    "video_url": _MEDIA,
}


def only_known(data: Mapping[str, Any], known: Collection[str], *, where: str) -> dict[str, Any]:
    """`data` without unsupported fields that ask for nothing; raises UnsupportedField for the others by name."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in known:
            kept[name] = value
            continue
        refusal = UNSUPPORTED.get(name)
        if refusal is None:
            near = get_close_matches(name, sorted(known), n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"Known fields: {', '.join(sorted(known))}."
            raise InvalidRequest(f"`{name}` is no field of {where}. {hint}", param=name, code="unknown_parameter")
        if value is not None and not refusal.passes(value):
            raise UnsupportedField(f"`{name}` is not supported in {where}. {refusal.advice}", param=name)
    return kept
