"""Text to token ids and back, on the `tokenizers` library alone (importing transformers costs seconds).

tokenizer.json decides how text is split. tokenizer_config.json, special_tokens_map.json, generation_config.json and
config.json add the special tokens and the ids that end a sequence. Special tokens inside the user's text are
recognised as such, as transformers does.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from anaphora.engine.chat_template import ChatTemplate, choose, read_templates
from anaphora.errors import ConfigError, CorruptModel, InvalidRequest, UnsupportedModel

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that chat templates may use by name."""

_END_NAMES = ("eos_token", "eot_token")
"""Keys of tokenizer_config.json whose token ends a turn."""

_TOKENWISE = {"ByteFallback", "Replace", "Metaspace", "Fuse", "Strip", "WordPiece", "ByteLevel", "Sequence"}
"""Decoders whose text for a token depends only on the token and on whether it is the first."""

_ANCHOR = "a"
"""A first token whose text no decoder changes: what follows it is decoded as in the middle of a text."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("anaphora-one-mark-per-byte", _one_mark_per_byte)


class Tokenizer:
    """A model's tokenizer. Does not change after it is made; safe to use from several threads.

    Decoding is done token by token, in bytes, so that a stream of tokens gives exactly the text that decoding them
    at once gives (engine/output_text.py). That text is the `tokenizers` library's, with one exception: in a run of
    byte tokens (<0xE4><0xBD>...) that is partly invalid UTF-8 the valid characters are kept, as sentencepiece does.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int],
        chat_templates: Mapping[str, str],
        digest: str,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = dict(chat_templates)
        self._compile = lru_cache(maxsize=None)(ChatTemplate)
        added = backend.get_added_tokens_decoder()
        self._added = {index: str(token.content) for index, token in added.items()}
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.digest = digest
        """SHA-256 in hex of everything that decides how text becomes ids."""
        kinds = _decoder_kinds(backend.decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read a model folder. `chat_template` (Jinja source) replaces the model's own.

        Raises CorruptModel (a file is missing or damaged), UnsupportedModel (no fast tokenizer can be made of it)
        and ConfigError (bad `chat_template`).
        """
        config = _read_json(folder / "tokenizer_config.json")
        tokens = _read_json(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
        backend, digest = _load_backend(folder)
        named = {name: text for name in _NAMED if (text := _content(tokens.get(name)))}
        try:
            additions = _additions(backend, tokens)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModel(
                f"The added tokens in {folder}/tokenizer_config.json have the wrong form ({error!r}): "
                "download the model again."
            ) from error
        backend.add_tokens(additions)
        if backend.post_processor is None and config.get("add_bos_token") and "bos_token" in named:
            bos = named["bos_token"]
            ids = [(bos, backend.token_to_id(bos))]
            backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
            digest.update(b"add_bos_token")
        digest.update(repr(additions).encode())
        ends = [backend.token_to_id(text) for name in _END_NAMES if (text := _content(tokens.get(name)))]
        if chat_template is not None:
            ChatTemplate(chat_template)
        return cls(
            backend,
            special_tokens=named,
            eos_token_ids=_eos_ids(folder).union(i for i in ends if i is not None),
            chat_templates={"default": chat_template} if chat_template is not None else read_templates(folder, config),
            digest=digest.hexdigest(),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's logits may be wider."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def chat_template(self) -> str | None:
        """Source of the template for chats without tools."""
        return self._templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has half of a surrogate pair at position {error.start}, which is not a character: remove it."
            ) from error
        # encode() would hold the interpreter's lock, and with it every other request, until it is done
        return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids outside the vocabulary have none; bytes that are no character become U+FFFD."""
        parts: list[bytes] = []
        for token_id in ids:
            if self.is_visible(token_id, skip_special_tokens=skip_special_tokens):
                parts.append(self.piece(token_id, first=not parts))
        return self.utf8_decoder().decode(b"".join(parts), final=True)

    def is_visible(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decoding passes this token on to the text at all."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        return self.token_text(token_id) is not None

    def piece(self, token_id: int, *, first: bool) -> bytes:
        """The bytes that a visible token adds to a text; a first one may lose the space that marks a word's start."""
        if first:
            return self._make_piece(token_id, [])
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id, [_ANCHOR])
        return piece

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """Turns pieces into text. Invalid bytes: one U+FFFD per sequence (byte-level) or per byte (byte fallback)."""
        return codecs.getincrementaldecoder("utf-8")("anaphora-one-mark-per-byte" if self._byte_fallback else "replace")

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ("Ġthe", "▁the", "<0x0A>"); None outside the vocabulary."""
        text: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token inside a text; of a special token, its name. Empty outside the vocabulary."""
        if token_id in self.special_token_ids:
            return self._added[token_id].encode()
        return self.piece(token_id, first=False) if self.token_text(token_id) is not None else b""

    def _make_piece(self, token_id: int, before: list[str]) -> bytes:
        token = str(self._backend.id_to_token(token_id))
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[c] for c in token)
            except KeyError:  # an added token, which is spelled as it reads
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            value = int(match[1], 16)
            if value >= 0x80 or before:
                return bytes([value])
        decoder = self._backend.decoder
        text = " ".join([*before, token]) if decoder is None else decoder.decode([*before, token])
        return str(text).removeprefix("".join(before)).encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The chat as the model's template writes it; see ChatTemplate.render.

        Raises InvalidRequest also when the model has no chat template, or a broken one.
        """
        try:
            template = self._compile(choose(self._templates, tools))
        except ConfigError as error:
            raise InvalidRequest(str(error), param="messages") from error
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._special_tokens | template_kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `render_chat(messages, **options)`; the template writes the BOS token, so none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (Radford et al., GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _decoder_kinds(decoder: Any) -> set[str]:
    """Types of the decoder's steps. Raises UnsupportedModel when one of them looks at more than one token."""
    if decoder is None:
        return set()
    spec = json.loads(decoder.__getstate__())
    steps = spec.get("decoders", [spec])
    kinds = {step["type"] for step in steps}
    strips_more = any(step["type"] == "Strip" and (step["start"] > 1 or step["stop"]) for step in steps)
    if kinds - _TOKENWISE or strips_more or ("ByteLevel" in kinds and kinds - {"ByteLevel", "Fuse"}):
        raise UnsupportedModel(
            f"The tokenizer's decoder ({', '.join(sorted(kinds))}) cannot be streamed token by token here: "
            "use a model with a byte-level, metaspace, byte-fallback or WordPiece decoder."
        )
    return kinds


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not valid JSON ({error}): download the model again.") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} does not hold a JSON object: download the model again.")
    return value


def _load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, hashlib._Hash]:
    """The tokenizer as the files define it, and a SHA-256 fed with that definition."""
    path = folder / "tokenizer.json"
    if path.is_file():
        data = path.read_bytes()
        try:
            return tokenizers.Tokenizer.from_buffer(data), hashlib.sha256(data)
        except Exception as error:  # the library raises plain Exception
            raise CorruptModel(f"{path} is not a tokenizer ({error}): download the model again.") from error
    backend = _convert(folder)
    return backend, hashlib.sha256(backend.to_str().encode())


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Without tokenizer.json: let transformers convert what is there (tokenizer.model, vocab.json + merges.txt ...)."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # anything at all, depending on the files
        reason = str(error).strip().partition("\n")[0]
    else:
        if loaded.is_fast:
            return tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
        reason = f"{type(loaded).__name__} is written in Python only"
    raise UnsupportedModel(
        f"{folder} has no tokenizer.json, and none can be made of its other files ({reason}). "
        "Put the model's tokenizer.json there; `pip install sentencepiece protobuf` may help with a tokenizer.model."
    )


def _content(token: Any) -> str | None:
    """A token's text, given plain or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _additions(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> list[AddedToken]:
    """Added tokens that the configs list and the tokenizer lacks, in order of their ids, and the special ones it does
    not know as special."""
    known = {str(token.content): token for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    additions = {spec["content"]: AddedToken(**spec) for _, spec in listed if spec["content"] not in known}
    known |= additions
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [value for key, value in config.items() if key.endswith("_token")]
    for text in filter(None, map(_content, [*named, *(extra.values() if isinstance(extra, dict) else extra)])):
        token = known.get(text) or AddedToken(text, normalized=False)
        if not token.special:
            token.special = True
            additions[text] = token
    return list(additions.values())


def _eos_ids(folder: Path) -> set[int]:
    """What ends a sequence: generation_config.json's word where it has one, else config.json's."""
    config = _read_json(folder / "config.json")
    sources = (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {})
    value: Any = next((s["eos_token_id"] for s in sources if s.get("eos_token_id") is not None), [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int for each in ids):
        raise CorruptModel(
            f"eos_token_id in {folder}/config.json or generation_config.json is {value!r}; it must be a token id or a "
            "list of them: download the model again."
        )
    return set(ids)
