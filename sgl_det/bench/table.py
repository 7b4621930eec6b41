"""The rows of e2e.json as a Markdown table, for the README and the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sgl_det.bench import results
from sgl_det.bench.arms import ARMS, DETERMINISTIC, NORMAL, OURS

_METRICS = {
    "seconds": "s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
}
_HEAD = (
    "backend",
    "workload",
    "rounds",
    "unit",
    "normal",
    "stock deterministic",
    "sgl_det",
    "speed ratio",
    "verdict",
    "key",
)


def servers_table(folder: Path, *, backend: str | None = None) -> str:
    """The arms of each workload side by side, under the newest key; then what each arm has alone.

    The speed ratio is normal's time over ours, with the smallest and largest of the rounds.
    """
    rows = results.newest(results.load(folder).get("rows", []))
    rows = [r for r in rows if backend in (None, r["backend"])]
    timed = [r for r in rows if r["metric"] in _METRICS]
    if not timed:
        return "\n".join(_alone(rows)) or "Not measured yet."
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    for cells in _lines(timed):
        lines.append(f"| {' | '.join(map(str, cells))} |")
    rest = [*_notes(timed), *_alone(rows)]
    return "\n".join([*lines, *(["", *rest] if rest else [])])


def _lines(rows: list[dict[str, Any]]) -> Iterable[tuple]:
    backends = sorted({r["backend"] for r in rows})
    for backend in backends:
        mine = [r for r in rows if r["backend"] == backend]
        for workload, metric in dict.fromkeys((r["workload"], r["metric"]) for r in mine):
            arms = {r["arm"]: r for r in mine if (r["workload"], r["metric"]) == (workload, metric)}
            ours = arms.get(OURS, {})
            values = [arms[a]["value"] if a in arms else "-" for a in (NORMAL, DETERMINISTIC, OURS)]
            any_row = ours or next(iter(arms.values()))
            tail = (ours.get("verdict", "-"), f"`{any_row['key']}`")
            unit = _METRICS[metric]
            yield (backend, workload, any_row["rounds"], unit, *values, speed_ratio(ours), *tail)


def speed_ratio(row: dict[str, Any]) -> str:
    """Normal's time over ours, and its spread; the note, or a dash, where there is no ratio."""
    if not row.get("ratio"):
        return "-"
    parts = (row["ratio"], row["ratio_max"], row["ratio_min"])
    middle, least, most = (round(1 / x, 3) for x in parts)
    return f"{middle} ({least} to {most})"


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """A line a note: of which rows it is."""
    by: dict[str, dict[str, None]] = {}
    for r in rows:
        if r.get("note"):
            where = f"{r['backend']} {r['workload']} ({_name(r['arm'])})"
            by.setdefault(r["note"], {})[where] = None
    return [f"* {', '.join(sorted(where))}: {note}" for note, where in sorted(by.items())]


def _name(arm: str) -> str:
    return "stock deterministic" if arm == DETERMINISTIC else arm


def _alone(rows: list[dict[str, Any]]) -> list[str]:
    """Of each backend, the start-up of its arms, and what each had alone on the machine."""
    out = []
    for workload, text in ((results.BESIDE, _beside_text), (results.ALONE, _alone_text)):
        facts = [r for r in rows if r["workload"] == workload]
        for backend in sorted({r["backend"] for r in facts}):
            value = {(r["arm"], r["metric"]): r["value"] for r in facts if r["backend"] == backend}
            arms = [a for a in ARMS if (a, "kv_tokens") in value]
            out.append(f"* {backend}, {' / '.join(map(_name, arms))}, {text(arms, value)}")
    return out


def _each(arms: list[str], value: dict[tuple[str, str], Any], metric: str) -> str:
    return " / ".join(str(value.get((a, metric), "-")) for a in arms)


def _beside_text(arms: list[str], value: dict[tuple[str, str], Any]) -> str:
    return (
        f"started side by side: ready in {_each(arms, value, 'ready_s')} s, pools of "
        f"{_each(arms, value, 'kv_tokens')} KV tokens, {_each(arms, value, 'host_gb')} GB of the "
        "host's memory"
    )


def _alone_text(arms: list[str], value: dict[tuple[str, str], Any]) -> str:
    share, tokens = "", [value[a, "kv_tokens"] for a in arms]
    if {NORMAL, OURS} <= set(arms):
        share = f" ({value[OURS, 'kv_tokens'] / value[NORMAL, 'kv_tokens']:.3f})"
    return (
        f"each alone on the GPU: room for {' / '.join(map(str, tokens))} KV tokens{share}, "
        f"{_each(arms, value, 'available_gb')} GB left"
    )
