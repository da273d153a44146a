"""A report as one HTML file that needs nothing else: style inside, plots as SVG, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NewType

Html = NewType("Html", str)
"""Markup whose texts are escaped already."""

Tone = Literal["good", "bad", "unsure"]

_STYLE = """
:root{--bg:#fff;--fg:#1c2430;--dim:#667080;--line:#dfe4ea;--soft:#f5f7f9;--good:#0a7d4f;--bad:#b3261e;--unsure:#8a5a00;
--c0:#2563eb;--c1:#0f9d76;--c2:#d97706;--c3:#9333ea;--c4:#64748b}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--fg:#e6eaf0;--dim:#97a3b3;--line:#2b333d;--soft:#1a2028;
--good:#4cc38a;--bad:#ff8a80;--unsure:#f0b849;--c0:#6ea8fe;--c1:#4cc38a;--c2:#f0b849;--c3:#c084fc;--c4:#94a3b8}}
body{background:var(--bg);color:var(--fg);font:16px/1.55 system-ui,sans-serif;max-width:880px;margin:2.5rem auto;
padding:0 1.25rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.25rem 0 .5rem}.dim,small{color:var(--dim)}
.verdict{border-left:5px solid;padding:.8rem 1.1rem;background:var(--soft);margin:1.25rem 0;font-size:1.1rem}
.good{border-color:var(--good)}.bad{border-color:var(--bad)}.unsure{border-color:var(--unsure)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.95rem}
th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:600}td.num,th.num{text-align:right}
pre{background:var(--soft);padding:.8rem 1rem;overflow-x:auto;font-size:.9rem;white-space:pre-wrap}
mark{background:#ffd54a;color:#000;border-radius:2px}li{margin:.35rem 0}
svg{width:100%;height:auto;margin:.75rem 0}svg text{fill:var(--fg);font:12px system-ui,sans-serif}
svg text.dim,svg tspan.dim{fill:var(--dim)}svg text.title{font-size:14px;font-weight:600}
svg .grid{stroke:var(--line)}svg line.median{stroke:var(--fg);stroke-width:2.5}
svg line.mark{stroke:var(--bad);stroke-dasharray:5 4}svg text.mark{fill:var(--bad);font-weight:600}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    parts: Sequence[Html]


def page(title: str, subtitle: str, verdict: str, tone: Tone, sections: Sequence[Section]) -> str:
    """The whole document. Sections without parts are left out."""
    body = "".join(
        f"<section><h2>{escape(section.heading)}</h2>{''.join(section.parts)}</section>"
        for section in sections
        if section.parts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="dim">{escape(subtitle)}</p>'
        f'<p class="verdict {tone}">{escape(verdict)}</p>{body}</body></html>\n'
    )


def paragraph(text: str) -> Html:
    return Html(f"<p>{escape(text)}</p>")


def bullets(texts: Sequence[str]) -> Html:
    return Html(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else "")


def preformatted(text: str) -> Html:
    return Html(f"<pre>{escape(text)}</pre>")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A column whose title starts with ">" is aligned right, as in the terminal's tables."""
    classes = [' class="num"' if column.startswith(">") else "" for column in columns]
    head = "".join(f"<th{c}>{escape(n.removeprefix('>'))}</th>" for c, n in zip(classes, columns, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{c}>{escape(v)}</td>' for c, v in zip(classes, row, strict=True))}</tr>" for row in rows
    )
    return Html(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
