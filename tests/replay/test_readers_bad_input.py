"""Bad input: lines that cannot be used are counted by number, files that cannot be read are said, nothing is lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from anaphora.errors import ConfigError, InputError
from anaphora.replay.readers.base import ReadReport, TraceRequest
from anaphora.replay.readers.source import read_trace
from anaphora.replay.spool import spooled
from anaphora.replay.study import read_all

DATA = Path(__file__).parents[1] / "data" / "traces"
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}


def read(path: Path, **options: object) -> tuple[list[TraceRequest], ReadReport]:
    report = ReadReport()
    return list(read_trace(path, report, **options)), report  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps(GOOD | {"timestamp": -1}), "timestamp is -1"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "timestamp is nan"),
        (json.dumps(GOOD | {"timestamp": 10**400}), "timestamp"),
        (json.dumps(GOOD | {"timestamp": True}), "timestamp is True"),
        (json.dumps(GOOD | {"input_length": -5}), "input_length is -5"),
        (json.dumps(GOOD | {"input_length": 1 << 40}), "input_length"),
        (json.dumps(GOOD | {"input_length": 600.5}), "whole number"),
        (json.dumps(GOOD | {"input_length": 6000}), "6,000 tokens do not make 2 blocks of 512"),
        (json.dumps(GOOD | {"output_length": "1"}), "output_length is '1'"),
        (json.dumps(GOOD | {"hash_ids": [0, "1"]}), "hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [0, -1]}), "hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [1, 1]}), "twice"),
    ],
)
def test_a_bad_line_is_counted_with_its_number_or_fails_when_strict(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{json.dumps(GOOD)}\n")
    found, report = read(path)
    assert len(found) == 2
    assert report.num_malformed == 1
    (number, why), *_ = report.malformed
    assert number == 3
    assert said in why
    with pytest.raises(InputError, match="line 3"):
        read(path, strict=True)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("azure.csv", "2023-11-16 18:17:04.0319600,3180"),
        ("azure.csv", "yesterday,3180,8"),
        ("azure.csv", "2023-11-16 18:17:04,-3,8"),
        ("chats.jsonl", '{"model": "m"}'),
        ("chats.jsonl", '{"messages": [5]}'),
        ("chats.jsonl", '{"prompt": "x", "timestamp": "tomorrow"}'),
        ("chats.jsonl", '{"prompt": "x", "timestamp": -4}'),
        ("bailian.jsonl", '{"timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [1, 2]}'),
    ],
)
def test_bad_lines_of_other_formats(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.write_text((DATA / file).read_text() + line)
    found, report = read(path)
    assert (len(found), report.num_malformed) == (len(read(DATA / file)[0]), 1)
    assert report.malformed[0][0] == report.lines


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"timestamp": "\xff"}\n')
    found, report = read(path)
    assert (len(found), report.malformed) == (1, [(2, "not UTF-8")])


def test_of_many_bad_lines_all_are_counted_and_some_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\nx" * 1000)
    _, report = read(path)
    assert (report.num_malformed, len(report.malformed)) == (1000, ReadReport.KEPT)


def test_requests_out_of_order_are_sorted_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    times = [5000, 1000, 1000, 9000, 0, 4000]
    lines = [json.dumps(GOOD | {"timestamp": time, "output_length": n}) for n, time in enumerate(times)]
    path.write_text("\n".join(lines))
    for run_bytes in (1, 1 << 20):  # every request a run of its own, and all in one
        monkeypatch.setattr("anaphora.replay.spool._RUN_BYTES", run_bytes)
        report = ReadReport()
        with spooled(read_trace(path, report), 16) as spool:
            found = [(prompt.arrival, prompt.output_tokens) for prompt in spool]
            assert (spool.seconds, spool.blocks) == (9, 12)
        assert found == [(0, 4), (1, 1), (1, 2), (4, 5), (5, 0), (9, 3)]
        assert report.out_of_order == 2


def test_merging_many_runs_keeps_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anaphora.replay.spool._RUN_BYTES", 3000)
    monkeypatch.setattr("anaphora.replay.spool._BUFFER", 100)
    requests = [TraceRequest(float(n * 7919 % 1000), 512 * (n % 9), 1, range(n % 9), 512) for n in range(1000)]
    with spooled(iter(requests), 16) as spool:
        found = list(spool)
    assert [prompt.arrival for prompt in found] == list(range(1000))
    by_time = sorted(requests, key=lambda request: request.arrival)
    assert [len(prompt.blocks) for prompt in found] == [len(request.hash_ids or ()) for request in by_time]


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\n \n")
    with pytest.raises(InputError, match="empty"):
        read(path)
    path.write_text('{"colour": "blue"}\n')
    with pytest.raises(InputError, match=r"no format that is known.*--format"):
        read(path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="no trace format is called 'vllm'"):
        read(path, form="vllm")
    with (
        pytest.raises(InputError, match="no usable request"),
        spooled(read_trace(path, ReadReport(), form="azure"), 16),
    ):
        pass


def test_a_trace_of_bad_lines_only_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(InputError, match=r"trace was read as Azure LLM inference, and line 1 .*--format mooncake"):
        list(read_all([path], [], lambda *_: None, form="azure"))
    assert len(list(read_all([path], [], lambda *_: None))) == 1


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_a_packed_trace_that_is_cut_short_or_damaged_is_said(tmp_path: Path, pack: object) -> None:
    whole = pack(b"".join(json.dumps(GOOD | {"timestamp": n}).encode() + b"\n" for n in range(5000)))  # type: ignore[operator]
    path = tmp_path / "trace"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged or cut short"):
        read(path)
    path.write_bytes(whole[:100] + bytes(255 - byte for byte in whole[100:200]) + whole[200:])
    with pytest.raises(InputError, match="damaged or cut short"):
        read(path)


def test_a_line_without_end_is_not_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anaphora.replay.readers.source.LONGEST_LINE", 1000)
    path = tmp_path / "trace"
    path.write_text("x" * 5000)
    with pytest.raises(InputError, match="more than 1,000 characters"):
        read(path)


def test_blocks_of_two_sizes_are_not_mixed() -> None:
    requests = [TraceRequest(0, 16, 1, [1], 16), TraceRequest(1, 32, 1, [1], 32)]
    with pytest.raises(InputError, match="mixes blocks of 16 and of 32"), spooled(iter(requests), 16):
        pass


def test_a_disk_without_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anaphora.replay.spool._append", full)
    with (
        pytest.raises(InputError, match="No space left on device; set TMPDIR"),
        spooled(iter([TraceRequest(0, 1)]), 16),
    ):
        pass
