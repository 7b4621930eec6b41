"""The frame of the report's page, and its tables as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from sgl_det.axis import Axis

_ARMS = {"stock": "stock", "stock_det": "stock det.", "sgl_det": "sgl_det"}

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sgl_det on {gpu}</title>
<style>
:root {{ --ink: #1b1f24; --soft: #5b6470; --line: #dfe3e8; --good: #e3f4ea; --bad: #fbe3e0; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1000px; padding: 32px 24px 64px; color: var(--ink);
  font: 16px/1.5 "Helvetica Neue", Helvetica, Arial, sans-serif; background: #fff; }}
h1 {{ font-size: 30px; line-height: 1.2; margin: 0 0 8px; }}
h2 {{ font-size: 21px; margin: 0 0 6px; }}
p {{ margin: 0 0 12px; max-width: 78ch; }}
.lead {{ font-size: 18px; }}
.soft {{ color: var(--soft); font-size: 14px; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0 34px; }}
.tile {{ flex: 1 1 200px; border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }}
.tile b {{ display: block; font-size: 27px; line-height: 1.2; }}
.tile span {{ color: var(--soft); font-size: 13.5px; line-height: 1.35; display: block; }}
section {{ margin: 0 0 40px; }}
img {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 13px; width: 100%; }}
th, td {{ border-bottom: 1px solid var(--line); padding: 4px 8px; text-align: left; }}
.matrix th, .matrix td {{ text-align: center; }}
.matrix th:first-child, .matrix td:first-child {{ text-align: left; }}
.matrix .good {{ background: var(--good); }} .matrix .bad {{ background: var(--bad); }}
.matrix .none {{ color: #9aa1ab; }} .matrix .ours {{ font-weight: 600; }}
.matrix .first {{ border-left: 2px solid var(--line); }}
.missing {{ border: 1px dashed #b8bec7; border-radius: 8px; padding: 14px 16px;
  color: var(--soft); }}
.legend {{ margin: 0; font-size: 14px; }}
details {{ margin-top: 10px; overflow-x: auto; }} summary {{ cursor: pointer; color: #0f6cbd; }}
code {{ font-size: 12px; }}
</style>
</head>
<body>
<h1>The same request, the same bits: sgl_det on {gpu}</h1>
<p class="lead">SGLang answers the same prompt differently at temperature 0, because the order of
its sums follows from who else is being served. sgl_det fixes the order and leaves the schedule
free.</p>
<p class="soft">{about}</p>
<div class="tiles">
{tiles}
</div>
{sections}
</body>
</html>
"""


MISSING = '<div class="missing">'


def tile(figure: str, text: str) -> str:
    """A headline figure; the figure is HTML already."""
    return f'<div class="tile"><b>{figure}</b><span>{html.escape(text)}</span></div>'


def missing(how: str) -> str:
    """What stands where there is no data."""
    return (
        f"{MISSING}Not measured yet on this machine; <code>{html.escape(how)}</code> does it.</div>"
    )


def details(summary: str, markdown: str) -> str:
    """A table, and the list below it, of our own Markdown, folded away."""
    lines = markdown.splitlines()
    rows = [x for x in lines if x.startswith("| ")]
    body = [f"<details><summary>{html.escape(summary)}</summary><table>"]
    for i, line in enumerate(rows):
        cell = "td" if i else "th"
        cells = (f"<{cell}>{_inline(c.strip())}</{cell}>" for c in line.strip("| ").split(" | "))
        body.append(f"<tr>{''.join(cells)}</tr>")
    notes = (f'<p class="soft">{_inline(x[2:])}</p>' for x in lines if x.startswith("* "))
    return "\n".join([*body, "</table>", *notes, "</details>"])


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def axes_matrix(rows: Sequence[dict[str, Any]]) -> str:
    """Axis by backend and arm: how many answers differ."""
    backends = list(dict.fromkeys(r["backend"] for r in rows))
    arms = [a for a in _ARMS if any(r["arm"] == a for r in rows)]
    cells = {(r["axis"], r["backend"], r["arm"]): r for r in rows}
    over = "".join(f'<th class="first" colspan="{len(arms)}">{b}</th>' for b in backends)
    under = "".join(_head(a, i) for _ in backends for i, a in enumerate(arms))
    out = [f'<table class="matrix"><tr><th></th>{over}</tr><tr><th>axis</th>{under}</tr>']
    for axis in Axis:
        found = [
            (cells.get((axis.value, b, a)), a, i) for b in backends for i, a in enumerate(arms)
        ]
        if any(r and r["requests"] for r, _, _ in found):
            line = "".join(_cell(*f) for f in found)
            out.append(f"<tr><td>{axis.value.replace('_', ' ')}</td>{line}</tr>")
    return "\n".join([*out, "</table>"])


def _head(arm: str, place: int) -> str:
    return f'<th class="{"first" if place == 0 else ""}">{_ARMS[arm]}</th>'


def _cell(row: dict[str, Any] | None, arm: str, place: int) -> str:
    kinds = ["first"] if place == 0 else []
    kinds += ["ours"] if arm == "sgl_det" else []
    if row is None or not row["requests"]:
        text = "&ndash;"
        kinds.append("none")
    else:
        good = row["mismatches"] == 0
        kinds.append("good" if good else "bad")
        text = f"{row['mismatches']} / {row['requests']}"
    return f'<td class="{" ".join(kinds)}">{text}</td>'
