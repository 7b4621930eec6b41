"""Three arms of one backend through the probe: stock, stock deterministic, sgl_det (twice).

usage: axes.py --model PATH --backends fa3,triton,flashinfer --out axes.json --logs FOLDER

Several servers share one GPU, with equal and bounded KV pools, and are probed one after the other;
the two sgl_det servers are compared with each other (axis `restart`). Rows are written as they
come. Exits 0 if every claimed axis of sgl_det is bitwise and stock diverged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from sgl_det.make_model import resolve_model
from sgl_det.probe import ProbeError, compare_reports, run_probe
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
SIDE_BY_SIDE = 4
# The control needs to diverge, not to diverge everywhere.
AXES = {
    "stock": (
        "run_to_run",
        "batch_size",
        "batch_composition",
        "chunked_prefill",
        "prefix_cache",
        "prefill_vs_decode",
        "logprob_neighbour",
    ),
    "sgl_det_again": ("run_to_run", "chunked_prefill", "prefill_vs_decode"),
}


def server(backend: str, arm: str, model: str, logs: Path) -> ServerProcess:
    """One server, not started."""
    module, extra = ARMS[arm]
    argv = ("--model-path", resolve_model(model), "--attention-backend", backend, *POOL, *SPEED)
    argv = (*argv, "--chunked-prefill-size", CHUNK[backend], *extra)
    return ServerProcess(module, argv, log=logs / f"{backend}-{arm}.log")


def measure(backends: list[str], model: str, logs: Path, done: Callable[..., None]) -> None:
    """Probe every arm of every backend, and call done(backend, {arm: Report}) for each backend.

    The stock arms get the short probe, and the restart the axes whose answers are compared. While
    one server is probed the next ones start: as many as fit on the GPU. A server that does not
    start or dies is reported and leaves its backend out.
    """
    plan = [(b, arm, server(b, arm, model, logs)) for b in backends for arm in ARMS]
    try:
        for _, _, first in plan[:SIDE_BY_SIDE]:
            first.start()
        reports: dict[str, Report] = {}
        for i, (backend, arm, current) in enumerate(plan):
            try:
                current.wait_ready(420)
                reports[arm] = probe_arm(current, arm)
                print(f"{backend} {arm}: {reports[arm].summary()}", flush=True)
            except (RuntimeError, ProbeError) as error:
                print(f"{backend} {arm}: {error}", flush=True)
            current.stop()
            if i + SIDE_BY_SIDE < len(plan):
                plan[i + SIDE_BY_SIDE][2].start()
            if arm == list(ARMS)[-1]:
                if len(reports) == len(ARMS):
                    done(backend, reports)
                reports = {}
    finally:
        for _, _, started in plan:
            started.stop()


def probe_arm(current: ServerProcess, arm: str) -> Report:
    return run_probe(
        current.url,
        quick=arm != "sgl_det",
        axes=AXES.get(arm),
        progress=False,
    )


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
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    backends = args.backends.split(",")
    passed = []

    def done(backend: str, reports: dict[str, Report]) -> None:
        found = rows(backend, reports)
        merge(args.out, found)
        print(reports["sgl_det"].table(), flush=True)
        passed.append(good(found))

    measure(backends, args.model, args.logs, done)
    return 0 if passed == [True] * len(backends) else 1


def merge(path: Path, found: list[dict]) -> None:
    """Put one backend's rows into the results file, in place of its older ones."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = [r for r in old if r["backend"] != found[0]["backend"]]
    path.write_text(json.dumps({"rows": [*kept, *found]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
