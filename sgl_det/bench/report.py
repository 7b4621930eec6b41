"""report.html of a machine: one self-contained page from the JSON files of its results.

It takes e2e.json, kernels.json, axes.json and thousand.json of a folder, whichever are there; a
section without its file says so. Figures that no file holds are not on the page.
"""

from __future__ import annotations

import base64
import html
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_det.bench import plots, results
from sgl_det.bench.arms import DETERMINISTIC, NORMAL, OURS
from sgl_det.bench.page import MISSING, PAGE, axes_matrix, details, missing, tile
from sgl_det.bench.table import servers_table
from sgl_det.make_model.shapes import SHAPES


def build(folder: Path) -> Path:
    """Write report.html into a folder of results; returns its path.

    Raises ValueError where the folder has none of the four files, RuntimeError without matplotlib.
    """
    names = ("e2e", "axes", "kernels", "thousand")
    found = {n: _load(folder / f"{n}.json") for n in names}
    if not any(found.values()):
        wanted = ", ".join(f"{n}.json" for n in names)
        raise ValueError(f"{folder} has none of {wanted}; measure first, with `sgl-det bench`")
    out = folder / "report.html"
    out.write_text(page(found, folder), encoding="utf-8")
    return out


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def page(found: dict[str, dict[str, Any]], folder: Path) -> str:
    """The page of these documents, by file name without its ending."""
    rows = results.newest(found["e2e"].get("rows", []))
    gpu = next((d["gpu"] for d in found.values() if d.get("gpu")), folder.name)
    sections = [
        _thousand(_largest(_rows(found, "thousand"))),
        _slowdown(rows, folder),
        _axes(_rows(found, "axes")),
        _latencies(rows),
        _kernels(found["kernels"]),
        _servers(found["e2e"].get("servers", [])),
    ]
    sections.sort(key=lambda text: MISSING in text)  # what is not measured yet comes last
    return PAGE.format(
        gpu=html.escape(gpu),
        about=html.escape(_about(found, rows)),
        tiles="\n".join(_tiles(found, rows)),
        sections="\n".join(sections),
    )


def _about(found: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """Which models were served, by which SGLang, and that made-up ones are made up."""
    models = sorted({r["model"] for r in rows} | {r["model"] for r in _rows(found, "thousand")})
    named = [f"{m} (that shape, with made-up weights)" if m in SHAPES else m for m in models]
    versions = sorted({s["version"] for s in found["e2e"].get("servers", []) if s.get("version")})
    parts = [f"Served: {', '.join(named)}."] if named else []
    return " ".join([*parts, *(f"SGLang {v}." for v in versions)])


def _rows(found: dict[str, dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return found[name].get("rows", [])


def _tiles(found: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    axes, kernels = _rows(found, "axes"), found["kernels"].get("rows", [])
    made = []
    experiment = _largest(_rows(found, "thousand"))
    ours = [r for r in experiment if r["arm"] == OURS]
    stock = [r for r in experiment if r["arm"] == NORMAL]
    if ours and stock:
        text = (
            f"distinct answers to one prompt, asked {ours[0]['completions']} times at temperature "
            f"0: stock SGLang and sgl_det ({', '.join(r['backend'] for r in ours)})"
        )
        made.append(tile(f"{_distinct(stock)} &rarr; {_distinct(ours)}", text))
    if axes:
        wrong = {
            a: sum(r["mismatches"] for r in axes if r["arm"] == a) for a in ("stock", "sgl_det")
        }
        asked = {a: sum(r["requests"] for r in axes if r["arm"] == a) for a in wrong}
        made.append(
            tile(
                f"{wrong['sgl_det']} of {asked['sgl_det']:,}",
                "answers of sgl_det that differ in a bit of tokens or log-probabilities; of stock "
                f"SGLang {wrong['stock']:,} of {asked['stock']:,}",
            )
        )
    ratios = [r for r in rows if r["metric"] == "seconds" and r["ratio"]]
    if ratios:
        worst = max(ratios, key=lambda r: r["ratio"])
        means = ", ".join(f"{b} {_percent(x)}" for b, x in _means(ratios).items())
        made.append(
            tile(
                f"{_percent(worst['ratio'])} at worst",
                f"latency of a whole server beside stock SGLang's normal mode ({worst['backend']} "
                f"{worst['workload']}); geometric means of {len(ratios)} workloads: {means}",
            )
        )
    if kernels:
        good = sum(r["bitwise"] for r in kernels)
        made.append(
            tile(
                f"{good:,} of {len(kernels):,}",
                "kernel cases bitwise equal to their fixed order of sums",
            )
        )
    return made


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The geometric mean of the ratios of each backend."""
    by: dict[str, list[float]] = {}
    for r in rows:
        by.setdefault(r["backend"], []).append(math.log(r["ratio"]))
    return {b: math.exp(math.fsum(x) / len(x)) for b, x in sorted(by.items())}


def _largest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one experiment, on every backend: of the most tokens."""
    if not rows:
        return []
    fields = ("model", "count", "tokens")
    most = max(rows, key=lambda r: r["count"] * r["tokens"])
    return [r for r in rows if all(r[n] == most[n] for n in fields)]


def _distinct(rows: Sequence[dict[str, Any]]) -> str:
    return " / ".join(str(r["distinct"]) for r in rows)


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}".replace("-", "\N{MINUS SIGN}")


def _section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n<p>{text}</p>\n{body}\n</section>"


def _image(svg: str, alt: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def _plot(title: str, text: str, draw: Callable[[Any], str], data: Any, how: str) -> str:
    if not data:
        return _section(title, text, missing(how))
    return _section(title, text, _image(draw(data), title))


def _thousand(rows: Sequence[dict[str, Any]]) -> str:
    title = "One prompt, a thousand times"
    if not rows:
        text = "One prompt at temperature 0, beside other people's requests of mixed lengths."
        return _section(title, text, missing("benchmarks/thousand.py"))
    first = rows[0]
    told = "; ".join(
        f"{plots.NAMES[r['arm']]} {r['distinct']} distinct"
        + (f", the first divergence at token {r['first_divergence']}" if r["distinct"] > 1 else "")
        for r in rows
    )
    text = (
        f"<q>{html.escape(first['prompt'])}</q>, {first['completions']} completions of "
        f"{first['tokens']} tokens at temperature 0, 1 to {first['in_flight']} at once beside 0 "
        f"to {first['background']} requests of others, compared as token ids "
        f"({html.escape(first['model'])}). {told}."
    )
    return _section(title, text, _image(plots.thousand(rows), title))


def _slowdown(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    title, timed = "What it costs", [r for r in rows if r["metric"] == "seconds"]
    text = (
        "Whole servers side by side with equal KV pools, driven in turn; the idle one has no work. "
        "A dot is the median of the ratios round by round, the bar behind it the smallest and the "
        "largest. Every figure has the verdict of a probe in the same run; where that is not "
        "bitwise there is no figure."
    )
    if not timed:
        return _section(title, text, missing("sgl-det bench"))
    legend = f'<p class="legend">{_mark(OURS)} sgl_det'
    if any(r["arm"] == DETERMINISTIC for r in timed):
        legend += f" &ensp; {_mark(DETERMINISTIC)} SGLang's own deterministic mode"
    else:
        legend += " &ensp; (SGLang's own deterministic mode: not measured in these runs)"
    body = f"{legend}</p>" + _image(plots.slowdown(timed), title)
    return _section(title, text, body + details("All figures", servers_table(folder)))


def _mark(arm: str) -> str:
    return f'<b style="color:{plots.COLOURS[arm]}">&#9679;</b>'


def _axes(rows: Sequence[dict[str, Any]]) -> str:
    text = (
        "A client sends a request alone, on a cold cache, then under every condition below, and "
        "compares tokens and log-probabilities as bits. A cell gives the answers that differ, of "
        "those compared; a dash is not tested. Stock SGLang is the control: a check that it passed "
        "would prove nothing."
    )
    body = axes_matrix(rows) if rows else missing("benchmarks/axes.py")
    return _section("What may change around a request", text, body)


def _latencies(rows: Sequence[dict[str, Any]]) -> str:
    text = "Requests of mixed lengths arrive one by one (Poisson), the same ones in every arm."
    told = [r for r in rows if r.get("quantiles") and r["workload"].startswith("poisson")]
    how = "sgl-det bench --suite full"
    return _plot("Latency under load", text, plots.latencies, told, how)


def _kernels(found: dict[str, Any]) -> str:
    text = (
        "Every point is one shape; above 1x our kernel is the faster one. The baseline is "
        "PyTorch's default for linear layers, SGLang's fused kernel for norms, and for attention "
        "the backend's own in normal mode. The line is the geometric mean."
    )
    how = "benchmarks/bench_kernels.py"
    return _plot("Kernels", text, plots.kernels, found.get("rows"), how)


def _servers(servers: Sequence[dict[str, Any]]) -> str:
    text = "Nothing but these flags was set; the numerics key says inside what the bits hold."
    lines = ["| backend | arm | key | KV tokens | command |", "|---|---|---|---|---|"]
    for s in servers:
        cells = (s["backend"], s["arm"], f"`{s['key']}`", s["max_total_num_tokens"])
        lines.append(f"| {' | '.join(map(str, cells))} | `python {s['command']}` |")
    body = details("The servers", "\n".join(lines)) if servers else missing("sgl-det bench")
    return _section("How to repeat it", text, body)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
