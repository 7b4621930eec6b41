"""``python -m sgl_det.readme [--check]``: the README's tables, from the data that they describe."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from sgl_det.axis import Axis
from sgl_det.backend import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_SHORT = {"stock": "stock", "stock_det": "stock deterministic", "sgl_det": "sgl_det"}


def claims_table() -> str:
    """Which axis is promised bitwise on which backend."""
    names = list(BACKENDS)
    lines = ["| axis | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for axis in Axis:
        cells = ["claimed" if axis in BACKENDS[n].claims else "not claimed" for n in names]
        lines.append(f"| {axis.value} | " + " | ".join(cells) + " |")
    sizes = [
        ", ".join(map(str, sorted(BACKENDS[n].head_dims))) if BACKENDS[n].head_dims else "any"
        for n in names
    ]
    lines.append("| head sizes | " + " | ".join(sizes) + " |")
    reasons = [
        f"* `{name}`, {axis.value}: {reason}"
        for name, backend in BACKENDS.items()
        for axis, reason in sorted(backend.not_claimed.items())
    ]
    return "\n".join([*lines, "", "Why an axis is not claimed:", *_grouped(reasons)])


def _grouped(reasons: list[str]) -> list[str]:
    by: dict[str, list[str]] = {}
    for line in reasons:
        where, _, reason = line.partition(": ")
        by.setdefault(reason, []).append(where.removeprefix("* "))
    out = []
    for reason, where in by.items():
        axes = {w.partition(", ")[2] for w in where}
        names = [w.partition(", ")[0] for w in where]
        who = "all" if set(names) == set(BACKENDS) else ", ".join(dict.fromkeys(names))
        out.append(f"* {', '.join(sorted(axes))} ({who}): {reason}")
    return out


def axes_table(machine: str) -> str:
    """Measured verdicts: mismatches of requests, by axis, backend and arm."""
    path = ROOT / "benchmarks" / "results" / machine / "axes.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    if not rows:
        return "Not measured yet."
    backends = list(dict.fromkeys(r["backend"] for r in rows))
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    cells = {(r["axis"], r["backend"], r["arm"]): r for r in rows}
    head = [f"{b}: {_SHORT[a]}" for b in backends for a in arms]
    lines = ["| axis | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for axis in Axis:
        found = [cells.get((axis.value, b, a)) for b in backends for a in arms]
        if any(f and f["requests"] for f in found):
            lines.append(f"| {axis.value} | " + " | ".join(map(_cell, found)) + " |")
    keys = sorted({f"`{r['key']}` ({r['backend']})" for r in rows if r["key"]})
    return "\n".join([*lines, "", f"Numerics keys of the sgl_det arms: {', '.join(keys)}."])


def _cell(row: dict | None) -> str:
    if row is None or not row["requests"]:
        return row["verdict"] if row else "not tested"
    if row["verdict"] == "bitwise":
        return f"bitwise ({row['requests']})"
    mark = "" if row.get("claimed") is not False else ", not claimed"
    return f"**{row['mismatches']} of {row['requests']}**{mark}"


def rendered(text: str) -> str:
    """The README with every generated block made anew."""
    blocks = {"claims": claims_table(), "axes-nvidia-h200": axes_table("nvidia-h200")}
    for name, body in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, n = re.subn(pattern, lambda m, b=body: f"{m[1]}{b}\n{m[2]}", text, flags=re.S)
        if n != 1:
            raise ValueError(f"README.md has {n} blocks named {name}, expected 1")
    return text


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    now = README.read_text()
    fresh = rendered(now)
    if "--check" in argv:
        if now != fresh:
            print("README.md: its tables are stale; run `python -m sgl_det.readme`")
        return int(now != fresh)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
