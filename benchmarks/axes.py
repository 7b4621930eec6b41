"""Three arms of one backend through the probe: stock, stock deterministic, sgl_det (twice).

usage: axes.py --model PATH --backends fa3,triton,flashinfer --out axes.json [--quick]

Starts the four servers of a backend side by side on one GPU, with equal and bounded KV pools, probes
them one after the other, and compares the two sgl_det servers with each other (axis `restart`). Rows
are written as they come. Exits 0 if every claimed axis of sgl_det is bitwise and stock diverged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from sgl_det.probe import compare_reports, run_probe
from sgl_det.probe.table import DIVERGED, Report
from sgl_det.server_process import ServerProcess

# Four 8B models share one GPU. Batches above 64 decode without a CUDA graph.
POOL = ("--max-total-tokens", "60000", "--max-running-requests", "128")
POOL = (*POOL, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "64")
SPEED = ("--disable-prefill-cuda-graph", "--skip-server-warmup")
# SGLang's deterministic FlashInfer and Triton align chunks to 4096 tokens; smaller ones never run.
CHUNK = {"flashinfer": "4096", "triton": "4096", "fa3": "2048"}
ARMS = {
    "stock": ("sgl_det.stock", ()),
    "stock_det": ("sgl_det.stock", ("--enable-deterministic-inference",)),
    "sgl_det": ("sgl_det.launch_server", ()),
    "sgl_det_again": ("sgl_det.launch_server", ()),
}
RESTART_AXES = ("run_to_run", "chunked_prefill", "prefill_vs_decode")


def servers(backend: str, model: str, logs: Path) -> dict[str, ServerProcess]:
    """The four servers of a backend, not started."""
    common = ("--model-path", model, "--attention-backend", backend, *POOL, *SPEED)
    common = (*common, "--chunked-prefill-size", CHUNK[backend])
    return {
        arm: ServerProcess(module, (*common, *extra), log=logs / f"{backend}-{arm}.log")
        for arm, (module, extra) in ARMS.items()
    }


def measure(backend: str, model: str, logs: Path, *, quick: bool = False) -> dict[str, Report]:
    """Reports by arm. The stock arms get the short probe, the restart the axes of its answers."""
    started = servers(backend, model, logs)
    try:
        for server in started.values():
            server.start()
        reports = {}
        for arm, server in started.items():
            server.wait_ready(420)
            t = time.monotonic()
            reports[arm] = run_probe(
                server.url,
                quick=quick or arm != "sgl_det",
                axes=RESTART_AXES if arm == "sgl_det_again" else None,
                progress=False,
            )
            took = time.monotonic() - t
            print(f"{backend} {arm} {took:.0f} s: {reports[arm].summary()}", flush=True)
        return reports
    finally:
        for server in started.values():
            server.stop()


def rows(backend: str, reports: dict[str, Report]) -> list[dict]:
    """The rows of axes.json for one backend."""
    restart = compare_reports(reports["sgl_det"].to_json(), reports["sgl_det_again"].to_json())
    out = []
    for arm in ("stock", "stock_det", "sgl_det"):
        for row in reports[arm].rows:
            if arm == "sgl_det" and row.axis == restart.axis:
                row = restart
            verdict = row.verdict
            if arm == "sgl_det" and row.claimed is False and not row.requests:
                verdict = "not claimed"
            out.append(
                {
                    "backend": backend,
                    "arm": arm,
                    "axis": row.axis,
                    "verdict": verdict,
                    "claimed": row.claimed,
                    "requests": row.requests,
                    "mismatches": row.mismatches,
                    "unique_tokens": row.unique_tokens,
                    "unique_logprobs": row.unique_logprobs,
                    "first": row.first.to_json() if row.first else None,
                    "note": row.note,
                    "key": reports[arm].key,
                }
            )
    return out


def good(found: list[dict]) -> bool:
    """Every claimed axis of sgl_det bitwise, and the control diverged."""
    ours = [r for r in found if r["arm"] == "sgl_det" and r["claimed"]]
    stock = [r for r in found if r["arm"] == "stock"]
    return all(r["verdict"] == "bitwise" for r in ours) and any(
        r["verdict"] == DIVERGED for r in stock
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--backends", default="fa3,triton,flashinfer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    ok = True
    for backend in args.backends.split(","):
        try:
            reports = measure(backend, args.model, args.logs, quick=args.quick)
        except RuntimeError as error:
            print(f"{backend}: {error}", flush=True)
            ok = False
            continue
        found = rows(backend, reports)
        print(reports["sgl_det"].table(), flush=True)
        merge(args.out, found)
        ok &= good(found)
    return 0 if ok else 1


def merge(path: Path, found: list[dict]) -> None:
    """Put one backend's rows into the results file, in place of its older ones."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = [r for r in old if r["backend"] != found[0]["backend"]]
    path.write_text(json.dumps({"rows": [*kept, *found]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
