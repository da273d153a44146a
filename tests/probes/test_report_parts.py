"""Pages and plots: well-formed, escaped, self-contained."""

from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import pytest

from anaphora.probes.endpoint import Endpoint
from anaphora.probes.engines import Engine
from anaphora.probes.html import Html, Section, bullets, page, paragraph, preformatted, table
from anaphora.probes.plots import Axis, Mark, Series, plot, short, strips
from anaphora.probes.report import envelope, to_json

NASTY = '<script>alert("x")</script> & co'


def parse(svg: Html) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_a_page_escapes_every_text_and_loads_nothing() -> None:
    parts = [paragraph(NASTY), bullets([NASTY]), preformatted(NASTY), table((NASTY, ">n"), [(NASTY, "1")])]
    text = page(NASTY, NASTY, NASTY, "bad", [Section(NASTY, parts), Section("left out", [])])
    assert "<script" not in text
    assert "left out" not in text
    assert not re.search(r"(?:src|href|url)\s*[=(]", text)
    assert text.count("&lt;script&gt;") == 10
    assert '<td class="num">1</td>' in text


def test_plots_are_well_formed_and_hold_every_point() -> None:
    series = [
        Series(NASTY, [1, 2, 4, 8], [1.0, 1.5, 9.0, 80.0], lows=[0.5, 1, 8, 70], highs=[2, 2, 10, 90]),
        Series("b", [1.0], [5.0], "dots"),
    ]
    drawing = parse(plot("t", "x", "y", series, marks=[Mark(4, "knee"), Mark(8, "end")], log_x=True, log_y=True))
    assert len(drawing.findall(".//circle")) == 5 + 2  # points, and the legend's
    assert len(drawing.findall(".//polygon")) == 1
    assert [t.text for t in drawing.findall(".//text") if t.get("class") == "mark"] == ["knee", "end"]


def test_strips_show_medians_and_empty_groups() -> None:
    drawing = parse(strips("t", "ms", {"cold": [100.0, 110.0, 90.0], "warm": []}, log_y=True))
    assert len(drawing.findall(".//circle")) == 3
    assert "median 100" in "".join(drawing.itertext())
    assert "n=0" in "".join(drawing.itertext())


def test_plots_of_nothing_and_of_one_value_do_not_fail() -> None:
    parse(plot("t", "x", "y", []))
    parse(plot("t", "x", "y", [Series("a", [3.0], [0.0])]))
    parse(plot("t", "x", "y", [Series("a", [3.0], [0.0])], log_x=True, log_y=True))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("top", [0.003, 1.0, 7.0, 123456.0])
def test_axes_keep_values_inside_and_have_ticks(log: bool, top: float) -> None:
    axis = Axis([top / 50, top], 0, 100, log=log)
    assert 0 <= axis.at(top / 50) < axis.at(top) <= 100
    assert 2 <= len(axis.ticks()) <= 12
    assert all(-1e-6 <= axis.at(tick) <= 100 + 1e-6 for tick in axis.ticks())


def test_short_numbers() -> None:
    assert [short(v) for v in (0, 0.01234, 1.0, 12.345, 999.4, 12345.6)] == [
        "0",
        "0.0123",
        "1",
        "12.3",
        "999",
        "12,346",
    ]


def test_json_is_finite_and_redacted() -> None:
    endpoint = Endpoint.parse("http://h", api_key="word-of-honour", environ={})
    report = {
        **envelope("x", endpoint, Engine(), None, interrupted=True),
        "a": [math.nan, (math.inf, "word-of-honour")],
    }
    text = to_json(report, endpoint)
    found = json.loads(text)
    assert found["a"] == [None, [None, "[redacted]"]]
    assert (found["schema_version"], found["command"], found["interrupted"]) == (1, "x", True)
