"""`anaphora replay`: table, JSON and page, exit codes, sizes in blocks and bytes, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anaphora.cli.replay import replay
from anaphora.cli.replay_plan import check
from anaphora.errors import AnaphoraError, ConfigError, InputError
from anaphora.replay.synthetic import chat

DATA = Path(__file__).parents[1] / "data" / "traces"
MODEL = ("--model", "llama-3.1-8b")  # 131,072 bytes a token, 64 MiB a block of 512
H100 = (*MODEL, "--hardware", "h100")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(replay, [*map(str, args), "--jobs", "1"], catch_exceptions=False)


def report(*args: str | Path, code: int = 0) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "conversations.jsonl"
    rows = [
        {
            "timestamp": round(1000 * request.arrival),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        for request in chat(300, 1, think=8.0)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_figures_of_a_small_trace_are_those_of_a_pencil() -> None:
    # 0 1 2 | 0 1 3 | 4 5 | 0 1 2 6: of 12 blocks 2 + 3 were seen before.
    found = report(DATA / "mooncake.jsonl", "--sizes", "3,7,20", "--policy", "lru")
    assert found["schema_version"] == 1
    assert found["trace"] | {"seconds": 61} == found["trace"]
    assert (found["trace"]["blocks"], found["trace"]["unique_blocks"], found["trace"]["input_tokens"]) == (12, 7, 5300)
    assert found["endless_cache"]["hit_blocks"] == 5
    assert found["endless_cache"]["hit_tokens"] == 2 * 512 + 3 * 512
    lru = {row["blocks"]: row["policies"]["lru"]["hit_blocks"] for row in found["sizes"]}
    assert lru == {3: 3, 7: 5, 20: 5}
    assert [row["policies"]["optimum"]["hit_blocks"] for row in found["sizes"]] == [3, 5, 5]
    assert [row["uses"] for row in found["top_prefixes"]] == [3, 2]
    assert [row["tokens"] for row in found["top_prefixes"]] == [1024, 1536]
    assert sum(row["blocks"] for row in found["reuse_seconds"]) == 5
    assert found["reuse_seconds"][1] == {"from": 1, "to": 2, "blocks": 2}
    assert sum(row["blocks"] for row in found["depth_tokens"]) == 12


def test_people_json_and_page_tell_the_same(conversations: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    args = (conversations, *H100, "--worth", "1", "--policy", "all", "--sizes", "100,400")
    told = run(*args, "--html", page)
    found = report(*args)
    assert told.exit_code == 0
    assert f"hits {100 * found['endless_cache']['block_hit_rate']:.1f}% of the blocks" in told.stdout
    for policy in ("lru", "lfu", "slru", "arc", "s3-fifo", "cost-aware", "hazard", "optimum"):
        rate = found["sizes"][1]["policies"][policy]["block_hit_rate"]
        assert f"{100 * rate:.1f}%" in told.stdout
        assert 0 < rate <= found["endless_cache"]["block_hit_rate"]
    for text in ("Reading", "Measuring reuse", "Trying caches"):
        assert text in told.stderr
    assert found["costs"]["bytes_per_token"] == 131072
    assert found["sizes"][1]["gib"] == 25
    hazard = found["sizes"][1]["policies"]["hazard"]["seconds"]
    assert 0 < hazard["saved_seconds"] < found["without_cache"]["prefill_seconds"]
    assert hazard["ttft_seconds"]["p50"] <= found["without_cache"]["ttft_seconds"]["p50"]
    assert found["worth"]["gib"] == 25
    assert "Up to 25.0 GiB a GiB saves 1 s an hour or more under hazard; more was not tried." in told.stdout
    assert "under hazard; beyond, less." in run(conversations, *H100, "--worth", "1", "--sizes", "400,40000").stdout
    html = page.read_text()
    assert html.count("<svg") == 5
    assert "hits" in html


def test_tiers_are_tried_behind_a_pool(conversations: Path) -> None:
    args = (conversations, *MODEL, "--prefill-speed", "20000", "--policy", "lru", "--kv-memory", "3GiB")
    tiers = ("--ram-cache", "12.5GiB", "--disk-cache", "1000")
    found = report(*args, *tiers, "--cache-write-policy", "on-eviction")["tiers"]
    assert (found["pool_blocks"], found["ram_blocks"], found["disk_blocks"]) == (48, 199, 1000)
    assert set(found["sources"]) == {"pool", "ram", "disk"}
    assert found["seconds"]["load_seconds"] > 0
    assert (found["policy"], found["ram_policy"], found["disk_policy"]) == ("lru", "lru", "lru")
    mixed = (*tiers, "--ram-eviction-policy", "lfu", "--disk-eviction-policy", "arc")
    other = report(*args, *mixed)["tiers"]
    assert (other["policy"], other["ram_policy"], other["disk_policy"]) == ("lru", "lfu", "arc")
    assert "lru, RAM lfu, disk arc, write-through." in run(*args, *mixed).stdout
    told = run(*args, "--ram-cache", "12.5GiB")
    assert "lru, write-through." in told.stdout
    assert "The pool alone saves" in told.stdout
    with pytest.raises(ConfigError, match="add --ram-cache"):
        run(*args, "--disk-cache", "9", "--cache-write-policy", "on-eviction")


def test_a_pool_alone_is_a_hierarchy_without_tiers(conversations: Path) -> None:
    found = report(conversations, "--policy", "lru", "--sizes", "48", "--kv-memory", "48")
    pool = found["tiers"]["sources"]["pool"]
    assert pool["hit_blocks"] == found["sizes"][0]["policies"]["lru"]["hit_blocks"] > 0


def test_slow_tiers_save_nothing(conversations: Path) -> None:
    args = (conversations, *MODEL, "--prefill-speed", "20000", "--policy", "lru", "--kv-memory", "48")
    found = report(*args, "--remote-cache", "5000", "--remote-speed", "0.001")["tiers"]
    assert found["sources"].get("remote", {"hit_blocks": 0})["hit_blocks"] == 0


def test_bounded_leaves_out_what_needs_the_whole_trace(conversations: Path) -> None:
    found = report(conversations, "--bounded", "--sizes", "50,200")
    assert found["endless_cache"] is None
    assert "reuse_seconds" not in found
    whole = report(conversations, "--sizes", "50,200")
    for row, other in zip(found["sizes"], whole["sizes"], strict=True):
        assert row["policies"]["lru"] == other["policies"]["lru"]
        assert row["policies"]["hazard"] == other["policies"]["hazard"]
        assert "optimum" not in row["policies"]
    assert run(conversations, "--bounded", "--sizes", "50").exit_code == 0


def test_sizes_are_chosen_so_that_the_last_holds_all_that_lru_can_use(conversations: Path) -> None:
    found = report(conversations, "--policy", "lru")
    assert found["sizes"][-1]["policies"]["lru"]["hit_blocks"] == found["endless_cache"]["hit_blocks"]
    assert 3 <= len(found["sizes"]) <= 10


def test_lengths_alone_are_no_trace_of_prefixes() -> None:
    result = run(DATA / "azure.csv")
    assert result.exit_code == 1
    assert "no hit can be told" in result.stdout
    assert "lengths only" in result.stdout
    found = report(DATA / "azure.csv", *H100, code=1)
    assert found["trace"]["holds_prefixes"] is False
    assert found["without_cache"]["prefill_seconds"] > 0
    assert found["sizes"] == []


def test_several_files_are_one_trace_and_bad_lines_are_shown(tmp_path: Path) -> None:
    lines = (DATA / "mooncake.jsonl").read_text().splitlines()
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("\n".join([*lines[2:], "broken"]))
    second.write_text("\n".join(lines[:2]))
    told = run(first, second, "--sizes", "20")
    assert told.exit_code == 0
    assert "a.jsonl: 1 of 3 lines left out. line 3: no JSON (Expecting value at character 1)" in told.stdout
    assert report(first, second)["endless_cache"]["hit_blocks"] == 5
    with pytest.raises(InputError, match="line 3"):
        run(first, "--strict")


def test_requests_out_of_order_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(reversed((DATA / "mooncake.jsonl").read_text().splitlines())))
    assert "3 requests out of order of time; they were sorted" in run(path).stdout
    assert report(path)["endless_cache"]["hit_tokens"] == 5 * 512


def test_chats_by_bytes_and_by_a_tokenizer(smollm2: Path) -> None:
    by_bytes = report(DATA / "chats.jsonl")
    assert by_bytes["trace"]["input_tokens"] == 97 + 90 + 23
    assert "every byte counts as a token" in by_bytes["files"][0]["remark"]
    found = report(DATA / "chats.jsonl", "--tokenizer", smollm2, "--block-size", "4")
    assert found["files"][0]["remark"] is None
    assert 50 < found["trace"]["input_tokens"] < 100
    assert found["endless_cache"]["hit_tokens"] >= 16  # the system prompt


def test_it_starts_without_heavy_packages() -> None:
    code = (
        "import sys, click.testing; from anaphora.cli.replay import replay;"
        f"result = click.testing.CliRunner().invoke(replay, [{str(DATA / 'mooncake.jsonl')!r}, '--sizes', '9']);"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'xxhash', 'zstandard'} & set(sys.modules);"
        "print(result.exit_code, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "0 []"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "clock"), "no eviction policy is called 'clock'"),
        (("--kv-memory", "9", "--ram-cache", "9", "--ram-eviction-policy", "clock"), "policy is called 'clock'"),
        (("--kv-memory", "9", "--ram-cache", "9", "--disk-eviction-policy", "lru"), "add --disk-cache"),
        (("--sizes", "many"), "--sizes 'many' is no size"),
        (("--sizes", "0"), "--sizes 0 is 0 blocks"),
        (("--sizes", "4GiB"), "add --model"),
        (("--sizes", "1KiB", *MODEL), "--sizes 1KiB is 0 blocks"),
        (("--ram-cache", "5"), "--kv-memory"),
        (("--bounded",), "--bounded simulates the sizes"),
        (("--hardware", "h100"), "--hardware needs --model"),
        (("--worth", "1", *MODEL), "--worth weighs seconds against GiB"),
        ((*MODEL, "--hardware", "h99"), "h99"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--format", "vllm"), "no trace format"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(AnaphoraError, match=said) as caught:
        run(DATA / "mooncake.jsonl", *args)
    assert caught.value.exit_code == 2


def test_worth_needs_time_and_may_be_unmet(conversations: Path, tmp_path: Path) -> None:
    assert report(conversations, *H100, "--worth", "1e6", code=1)["worth"]["gib"] is None
    path = tmp_path / "trace.jsonl"
    path.write_text((DATA / "mooncake.jsonl").read_text().splitlines()[0])
    with pytest.raises(ConfigError, match="same time"):
        run(path, *H100, "--worth", "1")


def test_every_command_line_of_the_docs_is_understood() -> None:
    text = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    lines = [shlex.split(line) for line in re.findall(r"^\$ anaphora replay (.+)$", text, re.MULTILINE)]
    assert len(lines) >= 3
    for arguments in lines:
        context = replay.make_context("replay", arguments)
        check({**context.params})


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--html"):
        run(DATA / "mooncake.jsonl", "--html", tmp_path / "missing" / "report.html")
