"""kernels.json: what the kernel benchmarks measured, a row a case, and its summary.

usage: python -m benchmarks.kernels_json FILE.jsonl ... [--out KERNELS.json]

A case that lies in several files counts as the last of them says; with --keep, cases of the
KERNELS.json that is there, and in no file, stay. A row's kernel is the fastest one that is bitwise,
the baseline (PyTorch's default; for norms SGLang's fused kernel, for attention the backend's own in
normal mode, of FlashInfer its FA2 kernel, with the time of what its `auto` takes beside it, for
samplers SGLang's in normal mode) only where no other is; of attention and samplers it is what
serves. Its ratio is the
baseline's time over the kernel's. Where nothing is bitwise there is no kernel, no time and no
ratio. Its spread is by how much the rounds of some arm differ. Printed are the cases below 0.95,
with what is known of each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sgl_det import numerics

OUT = Path(__file__).parent / "results" / "nvidia-h200" / "kernels.json"
NORMS = ("rms_norm", "fused_add_rms_norm", "qk_norm")
PHASES = ("decode", "prefill")  # attention: "triton decode"; M requests of N keys, heads of K
SAMPLER = "sample "  # "sample top_k 50": M rows of N logits
SERVED = "served"
_ID = ("op", "n", "k", "m", "dtype", "tp")
# What the kernels' bits depend on; a version that was not recorded is null.
_KEY = ("gpu", "torch", "triton", "cublas", "deep_gemm", "sgl_kernel", "flashinfer", "sources")
_BASELINES = ("default", "fused", "upstream")
_RANGES = {"1 to 64": (1, 64), "65 to 512": (65, 512), "above 512": (513, 1 << 30)}
_LIMITS = (0.95, 0.90, 0.80)
_WORST = 10


def read(paths: Iterable[Path]) -> tuple[list[dict], dict[str, dict]]:
    """The cases of all files, each with its numerics key, and the header of each key.

    Raises ValueError on a file that does not begin with its machine, or on two GPUs.
    """
    cases, headers = {}, {}
    for path in paths:
        header, *entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if "machine" not in header:
            raise ValueError(f'{path} begins with a case, expected {{"machine": ...}}')
        key = numerics.key({field: header["machine"].get(field) for field in _KEY})
        headers[key] = header
        for entry in entries:
            cases[tuple(entry[field] for field in _ID)] = entry | {"key": key}
    gpus = {header["machine"]["gpu"] for header in headers.values()}
    if len(gpus) != 1:
        raise ValueError(f"the files are of {len(gpus)} GPUs ({', '.join(gpus)}), expected one")
    return list(cases.values()), headers


def row(case: dict) -> dict[str, Any]:
    """A case as it stands in kernels.json."""
    arms = case["arms"]
    bitwise = {name: us for name, (us, mismatches) in arms.items() if mismatches == 0}
    others = {name: us for name, us in bitwise.items() if name not in _BASELINES}
    kernel = min(others or bitwise, key=bitwise.get, default=None)
    if SERVED in arms:
        kernel = SERVED if SERVED in bitwise else None
    baseline = next((name for name in _BASELINES if name in arms), None)
    us, baseline_us = bitwise.get(kernel), arms[baseline][0] if baseline else None
    auto = {"auto_us": arms["auto"][0]} if "auto" in arms else {}
    return {field: case[field] for field in _ID} | {
        "kernel": kernel,
        "us": us,
        "baseline_us": baseline_us,
        "ratio": round(baseline_us / us, 4) if us and baseline_us else None,
        "bitwise": kernel is not None,
        "baseline_bitwise": baseline in bitwise,
        "spread": case.get("spread"),
        "key": case["key"],
        **auto,
    }


def kind(case: dict) -> str:
    """linear, norms, attention or samplers."""
    if case["op"].startswith(SAMPLER):
        return "samplers"
    if case["op"].endswith(PHASES):
        return "attention"
    return "norms" if case["op"] in NORMS else "linear"


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return round(math.exp(math.fsum(map(math.log, values)) / len(values)), 4) if values else None


def _counts(rows: Sequence[dict]) -> dict[str, Any]:
    ratios = [r["ratio"] for r in rows if r["ratio"] is not None]
    return {
        "cases": len(rows),
        "bitwise": sum(r["bitwise"] for r in rows),
        "measured": len(ratios),
        "geomean": geomean(ratios),
        "under": {f"{limit:.2f}": sum(x < limit for x in ratios) for limit in _LIMITS},
    }


def summary(rows: Sequence[dict], by: Sequence[str], bits: Iterable[str]) -> dict[str, Any]:
    """Counts and geometric means of all rows, and by these fields and ranges of rows M."""
    groups = []
    for values in dict.fromkeys(tuple(r[field] for field in by) for r in rows):
        mine = [r for r in rows if tuple(r[field] for field in by) == values]
        ranges = {name: geomean(_ratios(mine, *rows_m)) for name, rows_m in _RANGES.items()}
        groups.append(dict(zip(by, values, strict=True)) | _counts(mine) | {"m": ranges})
    slow = sorted((r for r in rows if r["ratio"] is not None), key=lambda r: r["ratio"])
    return _counts(rows) | {
        "geomean_m_to_64": geomean(_ratios(rows, *_RANGES["1 to 64"])),
        "baseline_bitwise": sum(r["baseline_bitwise"] for r in rows),
        "bits": sorted(set(bits)),
        "groups": groups,
        "worst": slow[:_WORST],
    }


def _ratios(rows: Iterable[dict], least: int, most: int) -> list[float]:
    return [r["ratio"] for r in rows if r["ratio"] is not None and least <= r["m"] <= most]


def kept(before: dict[str, Any], cases: Sequence[dict]) -> tuple[list[dict], dict[str, dict]]:
    """Rows of an earlier document that no case replaces, and the headers of their keys."""
    new = {tuple(case[field] for field in _ID) for case in cases}
    rows = [r for r in before["rows"] if tuple(r[field] for field in _ID) not in new]
    keys = dict.fromkeys(r["key"] for r in rows)
    about = {k: {"machine": before["versions"][k], "bits": before["bits"][k]} for k in keys}
    return rows, about


def document(
    cases: Sequence[dict], headers: dict[str, dict], before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """All of kernels.json; ``before``: an earlier one, whose other rows stay."""
    old, about = kept(before, cases) if before else ([], {})
    headers = about | headers
    rows = [*old, *(row(case) for case in cases)]
    found = {}
    by = {"linear": ("dtype", "tp"), **dict.fromkeys(("norms", "attention"), ("op", "dtype"))}
    by["samplers"] = ("op",)
    for name, fields in by.items():
        mine = [r for r in rows if kind(r) == name]
        bits = {r["key"]: headers[r["key"]].get("bits", "") for r in mine}
        found[name] = summary(mine, fields, bits.values())
    gpu = next(iter(headers.values()))["machine"]["gpu"]
    versions = {key: header["machine"] for key, header in headers.items()}
    bits = {key: header.get("bits", "") for key, header in headers.items()}
    return {"gpu": gpu, "versions": versions, "bits": bits, "summary": found, "rows": rows}


def known(case: dict, found: dict) -> str:
    """What is known of a case that is slower than its baseline."""
    arms, notes = case["arms"], []
    baseline = next(name for name in _BASELINES if name in arms)
    if arms[baseline][1] is None:
        notes.append(f"{baseline} has an order of its own")
    elif arms[baseline][1]:
        notes.append(f"{baseline} has other bits ({arms[baseline][1]} mismatches)")
    else:
        notes.append(f"{baseline} has these bits")
    if case.get("spread", 0) > 0.05:
        notes.append(f"some arm's rounds differ by {case['spread']:.0%}")
    faster = {a: us for a, (us, bad) in arms.items() if bad and us < found["us"] and a != baseline}
    notes += [f"{a} takes {us:.2f} us and has other bits" for a, us in faster.items()]
    notes += [f"{a} failed: {error}" for a, error in case.get("errors", {}).items()]
    return "; ".join(notes)


def table(cases: Sequence[dict], rows: Sequence[dict], limit: float = _LIMITS[0]) -> str:
    """The cases below the limit, slowest first, and those where nothing is bitwise."""
    lines = [
        "op                       N      K     M dtype TP  baseline us       us  ratio  kernel"
    ]
    pairs = [(c, r) for c, r in zip(cases, rows, strict=True) if (r["ratio"] or 0) < limit]
    for case, r in sorted(pairs, key=lambda pair: pair[1]["ratio"] or 0):
        place = f"{r['op']:18} {r['n']:7} {r['k']:6} {r['m']:5} {r['dtype']:5} {r['tp']:2}"
        if r["ratio"] is None:
            lines.append(f"{place}  {'NOTHING IS BITWISE' if not r['bitwise'] else 'no baseline'}")
            continue
        figures = f"{r['baseline_us']:12.2f} {r['us']:8.2f} {r['ratio']:6.3f}"
        lines.append(f"{place} {figures}  {r['kernel']}: {known(case, r)}")
    return "\n".join(lines) if pairs else f"No case is below {limit}."


def text(made: dict[str, Any]) -> str:
    """The document as JSON, a row a line."""
    head = json.dumps(made | {"rows": []}, indent=1)
    rows = ",\n".join(f"  {json.dumps(r)}" for r in made["rows"])
    return head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--keep", action="store_true", help="rows of OUT that are in no file stay")
    args = parser.parse_args(argv)
    cases, headers = read(args.files)
    before = json.loads(args.out.read_text(encoding="utf-8")) if args.keep else None
    made = document(cases, headers, before)
    args.out.write_text(text(made), encoding="utf-8")
    print(table(cases, made["rows"][-len(cases) :]))
    for name, s in made["summary"].items():
        print(
            f"{name}: {s['cases']} cases, {s['bitwise']} bitwise; geometric mean {s['geomean']}, "
            f"to 64 rows {s['geomean_m_to_64']}; below {s['under']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
