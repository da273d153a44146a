"""docs/memory-model.md: its examples are run, and the figures it quotes are those of the benchmark."""

from __future__ import annotations

import doctest
import statistics
from pathlib import Path

import pytest

from support.reports import FILE, predict

DOC = Path(__file__).parents[1] / "docs" / "memory-model.md"


def test_the_examples_are_true() -> None:
    found = doctest.testfile(str(DOC), module_relative=False)
    assert found.attempted >= 15
    assert found.failed == 0


@pytest.mark.skipif(not FILE.exists(), reason="needs the start-up reports beside the checkout")
def test_the_quoted_figures_are_todays() -> None:
    found = list(predict())
    median = statistics.median(abs(item.error) for item in found)
    inside = sum(item.inside for item in found) / len(found)
    text = " ".join(DOC.read_text(encoding="utf-8").split())
    assert f"Against {len(found)} public start-up reports" in text
    assert f"median error {median:.2%}" in text
    assert f"holds the truth in {inside:.0%}" in text
