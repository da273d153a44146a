"""The table of `anaphora serve`'s options for README.md, made from the code.

python tools/readme_flags.py           print it
python tools/readme_flags.py --write   put it into README.md, between its two markers
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from anaphora.cli.serve import serve

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- flags: begin (tools/readme_flags.py) -->", "<!-- flags: end -->"


def flags_table() -> str:
    """Markdown, one row per option, in the order of --help."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    context = click.Context(serve)
    for parameter in serve.params:
        record = parameter.get_help_record(context)
        if record is None or not isinstance(parameter, click.Option):
            continue
        names = " / ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default if isinstance(parameter.default, (str, int, float)) else False
        shown = "" if default is False else f"`{'on' if default is True else default}`"
        rows.append(f"| {names} | {shown} | {parameter.help} |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """`readme` with the table between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{flags_table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(flags_table())
