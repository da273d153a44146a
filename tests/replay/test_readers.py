"""Traces of every format: found by their first lines, read as a stream, their names chained."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from anaphora.replay.readers.base import ReadReport, TraceRequest
from anaphora.replay.readers.source import read_trace
from anaphora.replay.spool import chained, spooled

DATA = Path(__file__).parents[1] / "data" / "traces"


def read(path: Path, **options: object) -> tuple[list[TraceRequest], ReadReport]:
    report = ReadReport()
    return list(read_trace(path, report, **options)), report  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "title", "lengths"),
    [
        ("mooncake.jsonl", "Mooncake", [1500, 1200, 600, 2000]),
        ("bailian.jsonl", "Bailian (Qwen)", [40, 64, 30]),
        ("azure.csv", "Azure LLM inference", [4808, 3180]),
        ("chats.jsonl", "chat log", [97, 90, 23]),
    ],
)
def test_the_format_is_told_from_the_first_lines(file: str, title: str, lengths: list[int]) -> None:
    found, report = read(DATA / file)
    assert report.format == title
    assert [request.input_length for request in found] == lengths
    assert (report.requests, report.num_malformed, report.out_of_order) == (len(lengths), 0, 0)


def test_times_are_seconds() -> None:
    assert [r.arrival for r in read(DATA / "mooncake.jsonl")[0]] == [0, 1, 4, 61]
    assert [r.arrival for r in read(DATA / "bailian.jsonl")[0]] == [0.5, 2.25, 3.0]
    first, second = (r.arrival for r in read(DATA / "azure.csv")[0])
    assert second - first == pytest.approx(0.052, abs=1e-5)
    a, b, c = (r.arrival for r in read(DATA / "chats.jsonl")[0])  # ISO 8601, and milliseconds since 1970
    assert (b - a, c - b) == (9, 11)


def test_bailian_names_stand_for_their_tokens_alone_and_are_chained() -> None:
    a, b, c = (chained(request, 16) for request in read(DATA / "bailian.jsonl")[0])
    assert a[:2] == b[:2]
    assert len({*a, *b, *c}) == 3 + 2 + 2  # block 8 after 11, and again after 10, is another
    assert all(len(name) == 16 for name in (*a, *b, *c))


def test_prompts_of_chats_share_their_beginning_under_one_model_only(tmp_path: Path) -> None:
    rows = [{"model": model, "messages": [{"role": "user", "content": "x" * 50}]} for model in "aab"]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found, report = read(path)
    a, b, c = (chained(request, 16) for request in found)
    assert a == b
    assert not set(a) & set(c)
    assert [request.arrival for request in found] == [0, 1, 2]
    assert "every byte counts as a token" in report.remark
    assert "one a second" in report.remark


def test_chats_are_tokenised_by_what_is_given() -> None:
    found, report = read(DATA / "chats.jsonl", tokenize=lambda request: list(range(len(request.get("prompt", "abc")))))
    assert [request.input_length for request in found] == [3, 3, 23]
    assert [request.output_length for request in found] == [21, 17, 0]
    assert report.remark == ""


def test_azure_says_that_it_holds_no_prefixes() -> None:
    found, report = read(DATA / "azure.csv")
    assert not any(request.has_blocks for request in found)
    assert "lengths only" in report.remark


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_traces_are_told_by_their_bytes_not_their_names(tmp_path: Path, suffix: str) -> None:
    data = (DATA / "mooncake.jsonl").read_bytes()
    half = len(data) // 2  # two frames, as `cat a.zst b.zst` gives
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / "trace"
    path.write_bytes(pack(data[:half]) + pack(data[half:]))
    assert read(path)[0] == read(DATA / "mooncake.jsonl")[0]


def test_a_format_can_be_said_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + (DATA / "azure.csv").read_bytes().replace(b"\n", b"\r\n"))
    assert len(read(path)[0]) == len(read(path, form="azure")[0]) == 2


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = io.TextIOWrapper(io.BytesIO((DATA / "azure.csv").read_bytes()))
    monkeypatch.setattr("sys.stdin", source)
    assert len(read(Path("-"))[0]) == 2


def test_reading_and_spooling_hold_a_part_of_the_trace_however_long_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anaphora.replay.spool._RUN_BYTES", 30_000)
    path = tmp_path / "trace.jsonl.gz"

    def peak(count: int) -> int:
        with gzip.open(path, "wt", compresslevel=1) as file:
            for number in range(count):
                ids = list(range(16 * number, 16 * number + 16))
                row = {"timestamp": number, "input_length": 8192, "output_length": 1, "hash_ids": ids}
                file.write(json.dumps(row) + "\n")
        tracemalloc.start()
        with spooled(read_trace(path, ReadReport()), 16) as spool:
            assert sum(1 for _ in spool) == spool.requests == count
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(2000) < 1.3 * peak(500) + 50_000
