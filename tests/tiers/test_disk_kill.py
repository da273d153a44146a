"""kill -9 at random moments under load: what was acknowledged is there, what is there is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WRITER = Path(__file__).with_name("killed_writer.py")


@pytest.mark.parametrize(("rounds", "limit"), [(100, 1 << 26), (100, 800_000)], ids=["room for all", "evicting"])
def test_200_kills(tmp_path: Path, rounds: int, limit: int) -> None:
    command = [sys.executable, str(WRITER), str(tmp_path), str(rounds), "7", str(limit)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    report = json.loads(answer.stdout)
    assert report["wrong"] == []
    assert report["acknowledged"] >= rounds // 2
