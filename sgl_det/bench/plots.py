"""The figures of the report, each as the text of an SVG, by matplotlib (the extra `report`)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from sgl_det.bench import stats
from sgl_det.bench.arms import DETERMINISTIC, NORMAL, OURS

COLOURS = {NORMAL: "#8a9099", DETERMINISTIC: "#d9822b", OURS: "#0f6cbd"}
NAMES = {NORMAL: "stock SGLang", DETERMINISTIC: "stock deterministic mode", OURS: "sgl_det"}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sgl_det",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa1ab",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e3e6ea",
}
_LEAST, _MOST = 1 / 3, 3.0  # latency ratios beyond are drawn at the edge
_SERIES = (("linear layers", "#0f6cbd"), ("norms", "#3a9e6e"), ("attention", "#b0489b"))


def _figure(width: float, height: float, **axes: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(**axes)


def _svg(draw: Any, *args: Any) -> str:
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError(
            "the report needs matplotlib, which is not installed; pip install 'sgl-det[report]'"
        ) from error
    with matplotlib.rc_context(_STYLE):
        fig = draw(*args)
        out = io.StringIO()
        fig.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def slowdown(rows: Sequence[dict[str, Any]]) -> str:
    """Latency beside normal mode, a panel a backend, a line a workload; time only."""
    return _svg(_slowdown, rows)


def _slowdown(rows: Sequence[dict[str, Any]]) -> Any:
    backends = sorted({r["backend"] for r in rows})
    sizes = [len({r["workload"] for r in rows if r["backend"] == b}) for b in backends]
    options = {"nrows": len(backends), "squeeze": False, "sharex": True}
    options["gridspec_kw"] = {"height_ratios": sizes}
    fig, axes = _figure(9, 0.9 + 0.34 * sum(sizes) + 0.4 * len(backends), **options)
    for ax, backend in zip(axes[:, 0], backends, strict=True):
        mine = [r for r in rows if r["backend"] == backend]
        names = list(dict.fromkeys(r["workload"] for r in mine))
        for y, name in enumerate(names):
            _line(ax, y, {r["arm"]: r for r in mine if r["workload"] == name})
        ax.axvline(1, color=COLOURS[NORMAL], lw=1.4)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_title(backend)
        ax.grid(axis="x")
        ax.set_axisbelow(True)
        ax.tick_params(axis="y", length=0)
    _percent_axis(axes[-1, 0])
    return fig


def _line(ax: Any, y: int, arms: dict[str, dict[str, Any]]) -> None:
    normal, ours, det = (arms.get(a) for a in (NORMAL, OURS, DETERMINISTIC))
    if det and normal:
        x = _inside(det["value"] / normal["value"])
        ax.plot(x, y, "D", color=COLOURS[DETERMINISTIC], ms=7, zorder=3)
    if not ours or not ours["ratio"]:
        ax.text(1.02, y, "no figure: not bitwise", va="center", color="#b3261e")
        return
    x, low, high = (_inside(ours[n]) for n in ("ratio", "ratio_min", "ratio_max"))
    ax.plot([low, high], [y, y], color=COLOURS[OURS], lw=3, alpha=0.45, solid_capstyle="butt")
    ax.plot([1, x], [y, y], color=COLOURS[OURS], lw=1, alpha=0.5)
    ax.plot(x, y, "o", color=COLOURS[OURS], ms=7, zorder=4)
    text = f"{ours['ratio'] - 1:+.1%}".replace("-", "\N{MINUS SIGN}")
    right = x >= 1
    ax.annotate(
        text,
        (max(x, high) if right else min(x, low), y),
        xytext=(8 if right else -8, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        fontsize=9,
        color="#20242a",
    )


def _inside(ratio: float) -> float:
    return min(_MOST, max(_LEAST, ratio))


def _percent_axis(ax: Any) -> None:
    ticks = (0.35, 0.5, 0.7, 0.85, 1, 1.15, 1.4, 2, 3)
    ax.set_xscale("log")
    ax.set_xlim(0.27, 3.4)
    ax.set_xticks(ticks, [f"{t - 1:+.0%}" if t != 1 else "equal" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("latency beside stock SGLang of the same backend (left: faster, right: slower)")


def kernels(rows: Sequence[dict[str, Any]]) -> str:
    """Speed of each kernel case beside its baseline, over its rows M, with geometric means."""
    return _svg(_kernels, rows)


def _kernels(rows: Sequence[dict[str, Any]]) -> Any:
    fig, axes = _figure(9, 3.6, ncols=3, sharey=True)
    for ax, (name, colour) in zip(axes, _SERIES, strict=True):
        mine = [r for r in rows if _series(r["op"]) == name and r["ratio"]]
        ax.set_title(f"{name} ({len(mine)} cases)")
        ax.axhline(1, color=COLOURS[NORMAL], lw=1.4)
        ax.plot(
            [r["m"] for r in mine], [r["ratio"] for r in mine], ".", color=colour, ms=4, alpha=0.35
        )
        sizes = sorted({r["m"] for r in mine})
        means = [_geomean([r["ratio"] for r in mine if r["m"] == m]) for m in sizes]
        ax.plot(sizes, means, "-", color=colour, lw=2)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = (0.5, 0.7, 1, 1.5, 2, 3, 5)
        ax.set_yticks(ticks, [f"{t:g}x" for t in ticks])
        ax.minorticks_off()
        ax.set_xlabel("requests at once" if name == "attention" else "rows M")
        ax.grid(axis="y")
        ax.set_axisbelow(True)
    axes[0].set_ylabel("speed beside the baseline (above 1x: faster)")
    return fig


def _series(op: str) -> str:
    if op.endswith(("decode", "prefill")):
        return "attention"
    if op.startswith("sample "):
        return "samplers"
    return "norms" if "norm" in op else "linear layers"


def _geomean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def latencies(rows: Sequence[dict[str, Any]]) -> str:
    """TTFT and ITL at each percentile, a line an arm; a row of panels a backend and workload."""
    return _svg(_latencies, rows)


def _latencies(rows: Sequence[dict[str, Any]]) -> Any:
    from matplotlib.ticker import LogLocator, NullLocator

    loads = list(dict.fromkeys((r["backend"], r["workload"]) for r in rows))
    fig, axes = _figure(9, 2.7 * len(loads) + 0.3, nrows=len(loads), ncols=2, squeeze=False)
    for line, (backend, workload) in zip(axes, loads, strict=True):
        for ax, metric in zip(line, ("ttft_p50_ms", "itl_p50_ms"), strict=True):
            mine = [
                r
                for r in rows
                if (r["backend"], r["workload"], r["metric"]) == (backend, workload, metric)
            ]
            for r in mine:
                style = {"color": COLOURS[r["arm"]], "label": NAMES[r["arm"]], "lw": 2}
                ax.plot(r["quantiles"], stats.QUANTILES, **style)
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_title(f"{backend}, {workload}")
            ax.set_xlabel("time to first token, ms" if "ttft" in metric else "between tokens, ms")
            ax.set_ylabel("% of requests" if "ttft" in metric else "% of tokens")
            ax.grid()
            ax.set_axisbelow(True)
    axes[0, 0].legend(frameon=False, fontsize=9)
    return fig


def thousand(rows: Sequence[dict[str, Any]]) -> str:
    """Distinct completions of each arm, and the share still in agreement at each token."""
    return _svg(_thousand, rows)


def _thousand(rows: Sequence[dict[str, Any]]) -> Any:
    fig, (left, right) = _figure(9, 0.9 + 0.5 * len(rows) + 1.2, ncols=2)
    for y, r in enumerate(rows):
        left.barh(y, r["distinct"], color=COLOURS[r["arm"]], height=0.6)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        left.annotate(str(r["distinct"]), (r["distinct"], y), weight="bold", **place)
        shares, share = [100.0], 100.0
        for _, n in r["divergences"]:
            share -= 100 * n / r["completions"]
            shares.append(share)
        xs = [0, *(i for i, _ in r["divergences"]), r["tokens"]]
        style = {"color": COLOURS[r["arm"]], "lw": 2, "where": "post"}
        right.step(xs, [*shares, share], label=NAMES[r["arm"]], **style)
    left.set_yticks(range(len(rows)), [f"{NAMES[r['arm']]} ({r['backend']})" for r in rows])
    left.invert_yaxis()
    left.set_xlim(0, 1.15 * max(r["distinct"] for r in rows))
    left.set_title("distinct completions of one prompt")
    right.set_ylim(0, 104)
    right.set_xlabel("token")
    right.set_title("% equal to the most frequent, up to here")
    right.legend(frameon=False, fontsize=9)
    return fig
