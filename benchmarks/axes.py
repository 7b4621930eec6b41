"""Three arms of each backend through the probe: stock, stock deterministic, sgl_det (twice).

usage: axes.py --run flashinfer:sgl_det,flashinfer:stock,... --out FOLDER [--seconds N]

Several servers share one GPU, with equal and bounded KV pools, and are probed one after the other.
Each report is written to FOLDER as it comes, so that runs can be cut short and continued;
FOLDER/axes.json is made from all reports that lie there. The two sgl_det servers of a backend are
compared with each other (axis `restart`). After --seconds a probe leaves out the rest of its cases.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from sgl_det.axis import Axis
from sgl_det.make_model import resolve_model
from sgl_det.probe import ProbeError, compare_reports, run_probe
from sgl_det.probe.runner import OUT_OF_REACH
from sgl_det.server_process import ServerProcess

BACKENDS = ("fa3", "triton", "flashinfer")
# Four 8B models share one GPU. Batches above 64 decode without a CUDA graph.
POOL = ("--max-total-tokens", "60000", "--max-running-requests", "128")
POOL = (*POOL, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "64")
SPEED = ("--disable-prefill-cuda-graph", "--skip-server-warmup")
# SGLang's deterministic FlashInfer and Triton align chunks to 4096 tokens; smaller ones never run.
CHUNK, ALIGNED = "2048", "4096"
ARMS = {
    "sgl_det": ("sgl_det.launch_server", ()),
    "stock_det": ("sgl_det.stock", ("--enable-deterministic-inference",)),
    "stock": ("sgl_det.stock", ()),
    "sgl_det_again": ("sgl_det.launch_server", ()),
}
SIDE_BY_SIDE = 4
# The control needs to diverge, not to diverge everywhere; of a restart the answers are compared.
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
    "sgl_det_again": ("batch_size", "chunked_prefill", "prefix_cache", "prefill_vs_decode"),
}
KEPT = ("axis", "verdict", "claimed", "requests", "mismatches", "unique_tokens", "unique_logprobs")


def server(backend: str, arm: str, model: str, logs: Path) -> ServerProcess:
    """One server, not started."""
    module, extra = ARMS[arm]
    argv = ("--model-path", resolve_model(model), "--attention-backend", backend, *POOL, *SPEED)
    chunk = ALIGNED if arm == "stock_det" and backend != "fa3" else CHUNK
    argv = (*argv, "--chunked-prefill-size", chunk, *extra)
    return ServerProcess(module, argv, log=logs / f"{backend}-{arm}.log")


def measure(
    run: list[tuple[str, str]], model: str, out: Path, deadline: float | None = None
) -> list[str]:
    """Probe each (backend, arm) and write its report; returns what could not be probed.

    While one server is probed the next ones start: as many as fit on the GPU. deadline, of
    time.monotonic(): a probe that reaches it leaves out the rest of its cases, and says so.
    """
    plan = [(backend, arm, server(backend, arm, model, out)) for backend, arm in run]
    failed = []
    try:
        for _, _, first in plan[:SIDE_BY_SIDE]:
            first.start()
        for i, (backend, arm, current) in enumerate(plan):
            try:
                current.wait_ready(420)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                report = run_probe(
                    current.url,
                    limit_s=left,
                    quick=arm in ("stock", "stock_det"),
                    axes=AXES.get(arm),
                    progress=False,
                )
                (out / f"{backend}-{arm}.json").write_text(json.dumps(report.to_json()))
                print(f"{backend} {arm}\n{report.table()}\n", flush=True)
            except (RuntimeError, ProbeError) as error:
                failed.append(f"{backend} {arm}: {error}")
                print(failed[-1], flush=True)
            current.stop()
            if i + SIDE_BY_SIDE < len(plan):
                plan[i + SIDE_BY_SIDE][2].start()
    finally:
        for _, _, started in plan:
            started.stop()
    return failed


def rows(folder: Path) -> list[dict]:
    """The rows of axes.json, from the reports in a folder."""
    found = []
    for backend in BACKENDS:
        for arm in ("stock", "stock_det", "sgl_det"):
            path = folder / f"{backend}-{arm}.json"
            if path.is_file():
                report = json.loads(path.read_text())
                again = folder / f"{backend}-sgl_det_again.json"
                found += [_row(backend, arm, report, r, again) for r in report["rows"]]
    return found


def _row(backend: str, arm: str, report: dict, row: dict, again: Path) -> dict:
    if (arm, row["axis"]) == ("sgl_det", "restart") and again.is_file():
        row = compare_reports(report, json.loads(again.read_text())).to_json()
    key = report["key"]
    return {"backend": backend, "arm": arm, **{k: row[k] for k in KEPT}, "key": key} | {
        "first": row["first"],
        "note": row["note"],
    }


def problems(found: list[dict], backend: str, *, control: bool = True) -> list[str]:
    """Claimed axes that are not bitwise, and a control that did not diverge.

    Axes that a client cannot drive have tests of their own; restart is one of them where, without
    control, sgl_det alone was run.
    """
    mine = [r for r in found if r["backend"] == backend]
    elsewhere = set(OUT_OF_REACH) - ({Axis.RESTART} if control else set())
    out = [
        f"{r['axis']}: {r['verdict']} ({r['first']})"
        for r in mine
        if r["arm"] == "sgl_det"
        and r["claimed"]
        and r["verdict"] != "bitwise"
        and r["axis"] not in elsewhere
    ]
    if not any(r["arm"] == "sgl_det" for r in mine):
        out.append("sgl_det was not probed")
    if control and not any(r["arm"] == "stock" and r["verdict"] == "diverged" for r in mine):
        out.append("the stock control did not diverge")
    return out


def write(folder: Path) -> list[dict]:
    """Make axes.json anew and return its rows."""
    found = rows(folder)
    (folder / "axes.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")
    return found


def main() -> int:
    everything = ",".join(f"{b}:{a}" for b in BACKENDS for a in ARMS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--run", default=everything, help="BACKEND:ARM, ... (default: all)")
    parser.add_argument("--seconds", type=float, help="cut the probes short after so long")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout`: stop the servers
    deadline = None if args.seconds is None else time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    run = [tuple(pair.split(":")) for pair in args.run.split(",") if pair]
    failed = measure(run, args.model, args.out, deadline)
    found = write(args.out)
    for backend in dict.fromkeys(b for b, _ in run):
        control = (backend, "stock") in run
        failed += [f"{backend} {p}" for p in problems(found, backend, control=control)]
    print("\n".join(failed) or "every claimed axis is bitwise, and every control red", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
