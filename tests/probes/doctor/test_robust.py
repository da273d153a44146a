"""Whatever a file holds: findings or a ConfigError, never another exception, and edits that apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import ConfigError
from anaphora.probes.doctor import jsonc
from anaphora.probes.doctor.files import lint_source
from anaphora.probes.doctor.fixing import apply
from anaphora.probes.doctor.logs import read_log
from anaphora.probes.doctor.source import Source

NAMES = ("settings.json", "auth.json", "config.toml", "vllm.yaml", "compose.yml", ".env", "run.sh")
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)
KEYS = st.sampled_from(
    ["env", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "tokens", "OPENAI_API_KEY", "auth_mode",
     "model", "model_provider", "model_providers", "base_url", "api_base", "api_key", "services", "image", "command",
     "ports", "model_list", "litellm_params", "max-model-len", "swap_space", "gpu_memory_utilization"]
) | st.text(max_size=8)  # fmt: skip
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)
PIECES = st.sampled_from(
    ["vllm", "serve", "llama-server", "sglang", "--swap-space", "8", "-c", "-fa", "--max-model-len", "0", "x", "\\\n",
     "\n",
     "'", '"', "=", ":", "- ", "{", "}", "[", "]", "export A", "#", "  ", "--port", "docker", "run", "-p", "1:2",
     "vllm/vllm-openai:v0.9", "\t", "--", "|", "null", "[model_providers.x]", "é", "\x00"]
)  # fmt: skip


def examine(name: str, text: str) -> None:
    source = Source(Path("nowhere") / name, text)
    try:
        lint_source(source)
    except ConfigError:
        return
    for finding in source.findings:
        assert finding.line is None or 1 <= finding.line <= len(source.lines)
    apply(text, [finding.edit for finding in source.findings if finding.edit])


@pytest.mark.parametrize("name", NAMES)
@given(value=JSON)
def test_any_structure(name: str, value: Any) -> None:
    examine(name, json.dumps(value))


@pytest.mark.parametrize("name", NAMES)
@given(pieces=st.lists(PIECES, max_size=25))
def test_any_text(name: str, pieces: list[str]) -> None:
    examine(name, " ".join(pieces))
    read_log(" ".join(pieces), "log")


@given(value=JSON, indent=st.sampled_from([None, 2]))
def test_json_is_read_as_json_reads_it(value: Any, indent: int | None) -> None:
    assert jsonc.parse(json.dumps(value, indent=indent)).value == value
    assert jsonc.parse(json.dumps(value, indent=indent, ensure_ascii=False)).value == value
