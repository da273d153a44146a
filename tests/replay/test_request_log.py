"""The request log: what is written, what is not, rotation, full disks, restarts, and that replay reads it."""

from __future__ import annotations

import json
import os
import stat
from hashlib import blake2b
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.replay.readers.base import ReadReport
from anaphora.replay.readers.source import read_trace
from anaphora.replay.request_log import NAME_BYTES, RequestLogWriter, RequestRecord
from anaphora.replay.spool import chained


def block(*names: object) -> bytes:
    return blake2b(repr(names).encode(), digest_size=16).digest()


def record(time: float, *names: int, tokens: int | None = None, **more: object) -> RequestRecord:
    blocks = [block(*names[: n + 1]) for n in range(len(names))]
    length = 16 * len(names) + 3 if tokens is None else tokens
    return RequestRecord(time, length, 5, blocks, {"pool": 16}, "stop", 0.25, 1.5, more)


def write(path: Path, *records: RequestRecord, max_bytes: int = 1 << 20, backups: int = 3) -> RequestLogWriter:
    writer = RequestLogWriter(path, max_bytes, backups, block_size=16, model="m")
    for each in records:
        writer.write(each)
    writer.close()
    return writer


def read(*paths: Path) -> tuple[list[list[bytes]], ReadReport]:
    report = ReadReport()
    found = [request for path in paths for request in read_trace(path, report)]
    return [[bytes(name) for name in chained(request, 16)] for request in found], report


def test_replay_reads_what_was_written_and_shared_prefixes_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    write(path, record(1.0, 1, 2, 3), record(2.5, 1, 2, 4), record(3.0, 9))
    report = ReadReport()
    found = list(read_trace(path, report))
    assert report.format == "Anaphora request log"
    assert [(r.arrival, r.input_length, r.output_length, r.block_size) for r in found] == [
        (1.0, 51, 5, 16),
        (2.5, 51, 5, 16),
        (3.0, 19, 5, 16),
    ]
    a, b, c = (chained(request, 16) for request in found)
    assert a[:2] == b[:2]
    assert len({*a, *b, *c}) == 5


def test_nothing_in_the_log_tells_what_a_block_holds(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    write(path, record(1.0, 1, 2, 3), record(2.0, 1, 2, cause="never_seen"))
    head, first, second = map(json.loads, path.read_text().splitlines())
    assert (head["anaphora_request_log"], head["block_size"], head["model"]) == (1, 16, "m")
    assert set(first) == {"time", "input_length", "output_length", "blocks", "hit", "ttft", "e2e", "outcome"}
    assert second["cause"] == "never_seen"
    text = path.read_text()
    for digest in record(1.0, 1, 2, 3).blocks:
        assert digest.hex()[: 2 * NAME_BYTES] not in text
    other = tmp_path / "other.log"
    write(other, record(1.0, 1, 2, 3))
    assert json.loads(other.read_text().splitlines()[1])["blocks"] != first["blocks"]  # every log has a key of its own


def test_files_are_their_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    path.touch(0o666)
    write(path, *(record(float(n), 1, 2) for n in range(20)), max_bytes=600)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_it_rotates_by_size_and_keeps_so_many(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    write(path, *(record(float(n), n, n + 1) for n in range(40)), max_bytes=1000, backups=3)
    files = sorted(tmp_path.glob("requests.log*"))
    assert [file.name for file in files] == [f"requests.log{end}" for end in ("", ".1", ".2", ".3", ".key")]
    assert all(file.stat().st_size <= 1000 for file in files)
    names, report = read(*(tmp_path / f"requests.log{end}" for end in (".3", ".2", ".1", "")))
    assert report.num_malformed == report.out_of_order == 0
    times = [
        r.arrival for end in (".3", ".2", ".1", "") for r in read_trace(tmp_path / f"requests.log{end}", ReadReport())
    ]
    assert times == list(map(float, range(40 - len(times), 40)))
    assert len(names) == len(times) > 10


def test_without_backups_the_old_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    write(path, *(record(float(n), 1) for n in range(30)), max_bytes=500, backups=0)
    assert {file.name for file in tmp_path.iterdir()} == {"requests.log", "requests.log.key"}
    assert path.stat().st_size <= 500


def test_a_restart_goes_on_and_ends_the_line_that_a_kill_cut(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    write(path, record(1.0, 1, 2))
    with path.open("a") as file:
        file.write('{"time": 2.0, "input_le')
    write(path, record(3.0, 1, 2))
    names, report = read(path)
    assert names[0] == names[1]  # the key is still the same
    assert report.num_malformed == 1


def test_a_full_disk_costs_log_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.log"
    writer = RequestLogWriter(path, 1 << 20, 1)
    whole = path.read_bytes()
    real = os.write

    def full(file: int, data: memoryview) -> int:
        if len(data) > 10:
            return real(file, bytes(data[:10]))  # some of it fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anaphora.replay.request_log.os.write", full)
    for n in range(5):
        writer.write(record(float(n), 1, 2, tokens=35))
    writer.close()
    assert writer.dropped == 5
    assert path.read_bytes() == whole  # no half line
    assert caplog.text.count("No space left on device") == 1
    writer.write(record(9.0, 1))
    assert writer.dropped == 6


def test_what_is_no_json_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "requests.log"
    writer = write(path, record(1.0, 1, bad=object()), record(2.0, 1))
    assert writer.dropped == 1
    assert len(path.read_text().splitlines()) == 2
    assert "could not be logged" in caplog.text


def test_a_log_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--request-log .*No such file"):
        RequestLogWriter(tmp_path / "missing" / "requests.log")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"anaphora_request_log": 2, "block_size": 16}', "version 2"),
        ('{"anaphora_request_log": 1, "block_size": -1}', "block_size"),
        ('{"time": 1.0, "input_length": 16, "output_length": 1, "blocks": "!"}', "base64"),
        ('{"time": 1.0, "input_length": 16, "output_length": 1, "blocks": "AAAA"}', "base64 of whole"),
        ('{"time": 1.0, "input_length": 64, "output_length": 1, "blocks": ""}', "64 tokens do not make 0 blocks of 16"),
        ('{"time": "now", "input_length": 0, "output_length": 1, "blocks": ""}', "time is 'now'"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "requests.log"
    write(path, record(1.0, 1))
    with path.open("a") as file:
        file.write(line)
    _, report = read(path)
    assert said in report.malformed[0][1]


def test_lines_without_a_head_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    path.write_text('{"time": 1.0, "input_length": 16, "output_length": 1, "blocks": ""}')
    report = ReadReport()
    assert list(read_trace(path, report, form="anaphora")) == []
    assert "begins with one" in report.malformed[0][1]
