"""A step that fails is computed again row by row, so that a request which cannot be computed takes no other with it.

To compute a row again is harmless: the same tokens go to the same slots, and no row reads what another one writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anaphora.engine.batch import Batch, BatchRow
from anaphora.engine.runner import ModelRunner, StepLogits


@dataclass(slots=True)
class Salvaged:
    done: list[tuple[BatchRow, StepLogits]] = field(default_factory=list)
    failed: list[tuple[BatchRow, Exception]] = field(default_factory=list)


def row_by_row(runner: ModelRunner, batch: Batch, error: Exception) -> Salvaged:
    """`error`: why the batch as a whole failed. State changes: the storage."""
    if len(batch.rows) == 1:
        return Salvaged(failed=[(batch.rows[0], error)])
    found = Salvaged()
    try:
        runner.copy(batch.copies)
    except Exception as again:
        return Salvaged(failed=[(row, again) for row in batch.rows])
    for row in batch.rows:
        try:
            found.done.append((row, runner.step(Batch((row,)))))
        except Exception as again:
            found.failed.append((row, again))
    return found
