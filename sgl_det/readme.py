"""``python -m sgl_det.readme [--check]``: the README's tables, from the data that they describe."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from sgl_det.axis import Axis
from sgl_det.backend import BACKENDS
from sgl_det.bench import table

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
    keys = ", ".join(_keys(rows))
    return "\n".join([*lines, "", f"Numerics keys of the sgl_det arms: {keys}."])


def _keys(rows: list[dict]) -> list[str]:
    """Each backend's keys; where it has several, the axes that only a few were measured under."""
    axes: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r["key"]:
            axes.setdefault((r["backend"], r["key"]), []).append(r["axis"])
    most = {}
    for (backend, _), found in axes.items():
        most[backend] = max(most.get(backend, 0), len(found))
    return [
        f"`{key}` ({backend}{'' if len(found) == most[backend] else ': ' + ', '.join(found)})"
        for (backend, key), found in sorted(axes.items())
    ]


def _cell(row: dict | None) -> str:
    if row is None or not row["requests"]:
        return row["verdict"] if row else "not tested"
    if row["verdict"] == "bitwise":
        return f"bitwise ({row['requests']})"
    mark = "" if row.get("claimed") is not False else ", not claimed"
    return f"**{row['mismatches']} of {row['requests']}**{mark}"


def kernels_table(machine: str) -> str:
    """Speed and bits of linear layers, norms and attention, from what ``kernels_json`` made."""
    path = ROOT / "benchmarks" / "results" / machine / "kernels.json"
    if not path.is_file():
        return "Not measured yet."
    found = json.loads(path.read_text())
    linear, norms, attention = (found["summary"][n] for n in ("linear", "norms", "attention"))
    samplers = found["summary"].get("samplers")
    keys = ", ".join(f"`{key}`" for key in sorted(found["versions"]))
    lines = [
        *_speeds(linear, {"dtype": "dtype", "tp": "TP"}),
        _verdict(linear, "torch's default has the same bits in"),
        "",
        *_speeds(norms, {"op": "norm", "dtype": "dtype"}),
        _norms_verdict(norms),
        "",
        *_speeds(attention, {"op": "attention", "dtype": "dtype"}),
        _verdict(attention, "the same bits in the backend's own kernel:"),
        *_beside_auto(found["rows"]),
        "",
        *(_samplers(samplers) if samplers and samplers["cases"] else []),
        f"Keys of the kernel results: {keys}.",
    ]
    return "\n".join(lines)


def _beside_auto(rows: list[dict]) -> list[str]:
    """FlashInfer's prefill beside the kernel that its normal mode takes, where that is another."""
    ratios = [f"{r['m']} x {r['n']} {r['auto_us'] / r['us']:.2f}" for r in rows if r.get("auto_us")]
    if not ratios:
        return []
    return [
        "The baseline of FlashInfer's prefill is its FA2 kernel. Against what its `auto` takes, on "
        f"Hopper FA3: {', '.join(ratios)}."
    ]


def _samplers(samplers: dict) -> list[str]:
    lines = _speeds(samplers, {"op": "sampler"})
    return [*lines, _verdict(samplers, "SGLang's normal mode, whose noise has no seed, in"), ""]


def _norms_verdict(norms: dict) -> str:
    if not norms["cases"]:
        return "Norms: not measured yet."
    return _verdict(norms, "SGLang's fused kernel, which serves where it is proven, in")


def _speeds(summary: dict, by: dict[str, str]) -> list[str]:
    """A table of geometric means, a group a line, by these fields under these names."""
    groups = summary["groups"]
    if not groups:
        return []
    ranges = list(groups[0]["m"])
    head = [*by.values(), "cases", *(f"M {r}" for r in ranges), "all", "under 0.95"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for g in groups:
        under = g["under"]["0.95"]
        share = f"{under} ({under / g['measured']:.0%})" if g["measured"] else "-"
        means = [_mean(x) for x in (*(g["m"][r] for r in ranges), g["geomean"])]
        cells = [*(str(g[field]) for field in by), str(g["cases"]), *means, share]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _verdict(summary: dict, baseline: str) -> str:
    """How many cases are bitwise, how many are slow, and the three slowest."""
    cases, bitwise = summary["cases"], summary["bitwise"]
    count = f"{bitwise} of {cases}"
    slow = ", ".join(f"{n} under {limit}" for limit, n in summary["under"].items())
    worst = "; ".join(
        f"`{r['op']}` {r['n']}{'x' + str(r['k']) if r['k'] else ''} {r['dtype']} TP{r['tp']} "
        f"M={r['m']} {r['ratio']:.3f}"
        for r in summary["worst"][:3]
    )
    return (
        f"Bitwise: {count if bitwise == cases else f'**{count}**'} ({'; '.join(summary['bits'])}); "
        f"{baseline} {summary['baseline_bitwise']}. Geometric mean {_mean(summary['geomean'])}, up "
        f"to M=64 {_mean(summary['geomean_m_to_64'])}; {slow}. Slowest: {worst or 'none'}."
    )


def servers_table(machine: str) -> str:
    """Our servers beside the same backend's normal mode, from e2e.json."""
    return table.servers_table(ROOT / "benchmarks" / "results" / machine)


def rendered(text: str) -> str:
    """The README with every generated block made anew."""
    blocks = {
        "claims": claims_table(),
        "axes-nvidia-h200": axes_table("nvidia-h200"),
        "kernels-nvidia-h200": kernels_table("nvidia-h200"),
        "servers-nvidia-h200": servers_table("nvidia-h200"),
    }
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
