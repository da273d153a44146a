"""Context x concurrency as a picture: one self-contained SVG, and an HTML page around it."""

from __future__ import annotations

from html import escape

from anaphora.planning.plan import Grid

_WIDTH, _HEIGHT, _LEFT, _TOP = 74, 34, 96, 54
_STEPS = ((0.5, "#1a9850"), (0.8, "#91cf60"), (1.0, "#d9ef8b"), (2.0, "#fdae61"), (float("inf"), "#d73027"))
"""Colour up to that part of the memory; from 1 on it does not fit."""
_DARK = {"#1a9850", "#d73027"}


def colour(part: float) -> str:
    """A cell's colour."""
    return next(name for limit, name in _STEPS if part <= limit)


def text_of(part: float) -> str:
    """A cell's text: 37% of the KV memory, 12x what there is."""
    if part == float("inf"):
        return "-"
    return f"{part:.0%}" if part < 9.995 else f"{part:,.0f}x"


def svg(found: Grid, title: str) -> str:
    """The picture; rows are contexts, columns concurrencies."""
    contexts, concurrencies, rows = found
    width = _LEFT + _WIDTH * len(concurrencies) + 12
    height = _TOP + _HEIGHT * len(contexts) + 12
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text x="{_LEFT}" y="18" font-weight="600">requests at once</text>',
        f'<text x="{_LEFT - 10}" y="{_TOP - 10}" text-anchor="end" font-weight="600">context</text>',
    ]
    for column, count in enumerate(concurrencies):
        x = _LEFT + _WIDTH * column + _WIDTH // 2
        out.append(f'<text x="{x}" y="{_TOP - 10}" text-anchor="middle">{count:,}</text>')
    for row, context in enumerate(contexts):
        y = _TOP + _HEIGHT * row
        out.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">{context:,}</text>')
        for column, part in enumerate(rows[row]):
            fill = colour(part)
            ink = "#fff" if fill in _DARK else "#222"
            x = _LEFT + _WIDTH * column
            out.append(
                f'<rect x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="3" fill="{fill}"/>'
                f'<text x="{x + _WIDTH // 2 - 1}" y="{y + 21}" text-anchor="middle" fill="{ink}">{text_of(part)}</text>'
            )
    return "\n".join([*out, "</svg>"])


def page(found: Grid, title: str, lines: list[str]) -> str:
    """A page without a script or a link."""
    notes = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(title)}</title>
<style>body {{ font-family: system-ui, sans-serif; margin: 2rem; color: #222; }}
li {{ margin: .3rem 0; }}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>Part of the memory for KV that so many requests of that length take. Green fits, orange and red do not.</p>
{svg(found, title)}
<ul>
{notes}
</ul>
</body>
</html>
"""
