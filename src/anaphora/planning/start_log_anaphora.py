"""What `anaphora serve` prints before it loads: exact bytes and blocks."""

from __future__ import annotations

from anaphora.planning.engine_report import EngineReport
from anaphora.planning.start_log_fields import Log, known


def read_anaphora(text: str, source: str) -> EngineReport:
    """The report, to the byte."""
    log = Log(text)
    return EngineReport(
        engine="anaphora",
        source=source,
        model=log.word(r"\n? *model  (\S+) \("),
        max_model_len=log.whole(r"at the full ([\d,]+) tokens"),
        max_num_seqs=log.whole(r"at most ([\d,]+) run at once"),
        block_size=log.whole(r"blocks  [\d,]+ of (\d+) tokens"),
        parts=known(weights=log.whole(r"weights  ([\d,]+) bytes")),
        available_bytes=log.whole(r"KV pool  ([\d,]+) bytes"),
        num_blocks=log.whole(r"blocks  ([\d,]+) of \d+ tokens"),
        tokens=log.whole(r"blocks  [\d,]+ of \d+ tokens = ([\d,]+) tokens"),
        precision=1,
    )
