"""``python -m sgl_det.demo``: SGLang as released and sgl_det side by side, through the same probe.

Starts both servers with the same made-up model, on a GPU if there is one and on the CPU otherwise,
drives each through the axes, prints the two results in one table and stops the servers. Exits 0
only if every claimed axis is bitwise and the stock control diverged.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.probe.table import DIVERGED, Report, format_table
from sgl_det.server_process import ServerProcess, running

CHUNK = 256
_COMMON = (
    "--chunked-prefill-size",
    str(CHUNK),
    "--max-total-tokens",
    "32768",
    "--max-running-requests",
    "64",
    "--skip-server-warmup",
    "--sleep-on-idle",
)


def arguments() -> tuple[str, ...]:
    """The SGLang flags that both arms get, for this machine."""
    import torch

    if torch.cuda.is_available():
        device = ("--attention-backend", "fa3", "--mem-fraction-static", "0.3")
    else:
        # In bf16 stock SGLang hardly diverges on a CPU without bf16 instructions.
        device = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32")
    return ("--model-path", str(resolve_model("demo")), *_COMMON, *device)


def main() -> int:
    begun = time.monotonic()
    argv = arguments()
    _say("Two servers, one model, the same requests: what depends on the other requests?\n")
    _say("starting SGLang as released, and sgl_det (about a minute) ...")
    with tempfile.TemporaryDirectory(prefix="sgl_det-demo-") as folder:
        arms = {
            "stock": ServerProcess("sgl_det.stock", argv, log=Path(folder, "stock.log")),
            "sgl_det": ServerProcess("sgl_det.launch_server", argv, log=Path(folder, "ours.log")),
        }
        try:
            with running(arms.values()):
                reports = {}
                for name, server in arms.items():
                    _say(f"\nprobing {name} at {server.url}")
                    reports[name] = run_probe(server.url, quick=True)
        except RuntimeError as error:
            _say(f"the demo could not be run: {error}")
            return 2
    stock, ours = reports["stock"], reports["sgl_det"]
    _say("\n" + "\n".join(side_by_side(stock, ours)))
    for name, report in reports.items():
        first = next((r.first for r in report.rows if r.first), None)
        if first:
            _say(f"\nfirst divergence of {name}: {first}")
    good = ours.passed and any(r.verdict == DIVERGED for r in stock.rows)
    _say("\n" + last_line(stock, ours, good, time.monotonic() - begun))
    return 0 if good else 1


def side_by_side(stock: Report, ours: Report) -> list[str]:
    """One line for each axis that either arm was driven through."""
    columns = ("axis", "stock SGLang", "wrong", "distinct", "", "sgl_det", "wrong", "distinct")
    rows = []
    for a, b in zip(stock.rows, ours.rows, strict=True):
        if a.requests or b.requests:
            rows.append((a.axis, *_cells(a), "|", *_cells(b)))
    return format_table((*columns, "claimed"), [(*r, _claim(ours, r[0])) for r in rows])


def _claim(report: Report, axis: str) -> str:
    return "yes" if report.row(axis).claimed else "no"


def _cells(row) -> tuple[str, str, str]:
    return (
        row.verdict,
        f"{row.mismatches} of {row.requests}",
        f"{row.unique_tokens} / {row.unique_logprobs}",
    )


def last_line(stock: Report, ours: Report, good: bool, seconds: float) -> str:
    """The summary: how many answers one prompt got from each server."""
    a, b = stock.subject, ours.subject
    return (
        f"{'PASSED' if good else 'FAILED'}: one prompt under {a['conditions']} conditions: stock "
        f"{a['unique_tokens']} distinct completions and {a['unique_logprobs']} distinct logprob "
        f"vectors, sgl_det {b['unique_tokens']} and {b['unique_logprobs']}; mismatches: stock "
        f"{_mismatches(stock)}, sgl_det {_mismatches(ours)}; {seconds:.0f} s"
    )


def _mismatches(report: Report) -> str:
    wrong = sum(r.mismatches for r in report.rows)
    return f"{wrong} of {sum(r.requests for r in report.rows)} answers"


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
