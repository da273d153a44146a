"""Starts of vLLM, SGLang and llama-server: unknown, outdated, misleading and contradicting options, by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from anaphora.probes.doctor.engine_options import table_of
from anaphora.probes.doctor.files import lint
from anaphora.probes.doctor.source import Source


def check(folder: Path, name: str, text: str) -> Source:
    path = folder / name
    path.write_text(text)
    return lint(path)


def found(source: Source) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.line) for finding in source.findings]


USERS_FILE = """\
model: Qwen/Qwen2.5-7B-Instruct
dtype: float16
max_model_len: 32768
gpu_memory_utilization: 0.90
max_num_seqs: 16
enable_prefix_caching: true
block_size: 16
swap_space: 8
num_gpu_blocks_override: null
"""


def test_the_configuration_people_paste(tmp_path: Path) -> None:
    source = check(tmp_path, "vllm.yaml", USERS_FILE)
    assert source.kind == "vLLM config"
    assert found(source) == [("option.removed", 8), ("vllm.null", 9)]
    removed = source.findings[0]
    assert "0.18" in removed.what
    assert removed.edit is not None
    assert (removed.edit.find, removed.edit.put, removed.edit.safe) == ("swap_space", "kv_offloading_size", False)


def test_a_sound_start_has_no_finding(tmp_path: Path) -> None:
    text = """\
#!/bin/sh
# vllm serve --swap-space 8 is how it was done once
exec vllm serve Qwen/Qwen2.5-7B-Instruct --max_model_len 32k \\
    --gpu-memory-utilization=0.9 --no-enable-log-requests -tp 2 \\
    --compilation-config.mode 3 --max-num-seqs 16 2>&1 | tee --append log
python -m sglang.launch_server --model-path x --context-length 8192 --tp 2
llama-server -m model.gguf -c 8192 -ngl 99 -fa on -ctk q8_0 -ctv q8_0
"""
    source = check(tmp_path, "run.sh", text)
    assert [launch.engine for launch in source.launches] == ["vllm", "sglang", "llama_server"]
    assert found(source) == []


@pytest.mark.parametrize(
    ("command", "code", "put"),
    [
        ("vllm serve m --max-model-length 8192", "option.unknown", "--max-model-len"),
        ("vllm serve m --frobnicate", "option.unknown-alone", None),
        ("vllm serve m --disable-log-requests", "option.removed", ""),
        ("vllm serve m --mem-fraction-static 0.8", "option.removed", "--gpu-memory-utilization"),
        ("vllm serve m --cpu-offload-gb 8", "option.misleading", None),
        ("vllm serve m --no-enable-prefix-caching", "option.misleading", None),
        ("vllm serve m --kv-cache-dtype int8", "option.value", None),
        ("vllm serve m --gpu-memory-utilization 90", "option.share", "0.9"),
        ("vllm serve m --gpu-memory-utilization 0.99", "option.share-high", "0.97"),
        ("vllm serve m --max-num-batched-tokens 8 --max-num-seqs 16", "rule.batch-seqs", None),
        ("vllm serve m --max-num-batched-tokens 2048 --max-model-len 8192 --no-enable-chunked-prefill",
         "rule.batch-context", None),
        ("vllm serve m --num-gpu-blocks-override 100 --max-model-len 8192", "rule.blocks", None),
        ("vllm serve m --kv-cache-memory-bytes 8G --gpu-memory-utilization 0.9", "rule.two-sizes", None),
        ("python -m sglang.launch_server --model x --enable-radix-cache", "option.removed", ""),
        ("sglang serve --model-path x --max-model-len 8192", "option.removed", "--context-length"),
        ("python -m sglang.launch_server --model x --kv-cache-dtype int8", "option.value", None),
        ("llama-server -m x.gguf --mlock", "option.removed", None),
        ("llama-server -m x.gguf --draft 8", "option.removed", "--spec-draft-n-max"),
        ("llama-server -m x.gguf --cache-reuse 256", "option.misleading", None),
        ("llama-server -m x.gguf -fa", "rule.flash-bare", "-fa on"),
        ("llama-server -m x.gguf -c 16384 -np 4", "rule.slots", None),
        ("llama-server -m x.gguf -ctv q4_0 -fa off", "rule.quantized-values", None),
        ("docker run --gpus all -p 8000:8000 vllm/vllm-openai --model m --port 9000", "rule.container-port", None),
        ("docker run -p 30000:30000 lmsysorg/sglang:latest python3 -m sglang.launch_server --model m",
         "rule.container-host", None),
    ],
)  # fmt: skip
def test_one_thing_wrong_in_a_command(tmp_path: Path, command: str, code: str, put: str | None) -> None:
    source = check(tmp_path, "run.sh", f"#!/bin/sh\n{command}\n")
    assert found(source) == [(code, 2)]
    edit = source.findings[0].edit
    assert (edit.put if edit else None) == put


def test_an_older_image_may_still_have_the_option(tmp_path: Path) -> None:
    run = "docker run vllm/vllm-openai:v{} --model m --swap-space 8"
    assert found(check(tmp_path, "a.sh", run.format("0.10.2"))) == []
    assert found(check(tmp_path, "b.sh", run.format("0.19.0"))) == [("option.removed", 1)]


COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:latest
    command: >
      --model Qwen/Qwen2.5-7B-Instruct
      --max-model-len 32768
      --swap-space 8
    ports: ["8000:8000"]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}
  sglang:
    image: lmsysorg/sglang:latest
    command:
      - python3
      - -m
      - sglang.launch_server
      - --model-path=x
      - --host=0.0.0.0
      - --enable-radix-cache
    ports:
      - "127.0.0.1:30001:30000"
  db:
    image: postgres:17
    command: ["postgres", "-c", "max_connections=200"]
"""


def test_a_compose_file(tmp_path: Path) -> None:
    source = check(tmp_path, "compose.yaml", COMPOSE)
    assert source.kind == "compose file"
    assert found(source) == [("option.removed", 7), ("option.removed", 18)]
    assert source.launches[0].model_name == "Qwen/Qwen2.5-7B-Instruct"
    assert source.launches[1].ports == ((30001, 30000),)


def test_a_kubernetes_container(tmp_path: Path) -> None:
    text = """\
apiVersion: apps/v1
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.30.0
          command: ["vllm", "serve", "m"]
          args: ["--max-model-len", "8192", "--num-scheduler-steps", "8"]
"""
    assert found(check(tmp_path, "deploy.yaml", text)) == [("option.removed", 9)]


def test_litellm_bases(tmp_path: Path) -> None:
    text = """\
model_list:
  - model_name: local
    litellm_params:
      model: openai/qwen
      api_base: http://127.0.0.1:8000
"""
    source = check(tmp_path, "litellm.yaml", text)
    assert found(source) == [("litellm.no-key", 5), ("base.openai", 5)] or found(source) == [
        ("base.openai", 5),
        ("litellm.no-key", 5),
    ]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_server"])
def test_the_tables_are_consistent(engine: str) -> None:
    """What is called removed is not accepted, what replaces it is, and what misleads exists."""
    table = table_of(engine)
    for name, entry in table.removed.items():
        assert engine == "llama_server" or name not in table.options, name
        assert not entry.get("put") or entry["put"] in table.options, name
    for name in table.misleading:
        assert table.knows(name), name
    for name in table.choices:
        assert table.knows(name), name
