"""A worker process and how to talk to it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.server import end_session, last_words

ROOT = Path(__file__).resolve().parents[2]


class WorkerFailed(Exception):
    """The peer cannot do it; the message is for the table."""


class Worker:
    """A module of this package run by a peer's own interpreter. `close` ends it."""

    def __init__(self, python: Path, module: str, environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._answers: queue.Queue[str] = queue.Queue()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(python), "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environ),
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, command: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One command, one answer. Raises WorkerFailed; after a time-out or an end the worker is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except OSError:
            line = ""
        except queue.Empty:
            self.close()
            raise WorkerFailed(f"no answer within {timeout:.0f} s") from None
        if not line:
            code = self.process.wait(timeout=30)
            raise WorkerFailed(f"the process ended with exit code {code}: {last_words(self.log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def close(self) -> None:
        end_session(self.process, 10.0)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")
