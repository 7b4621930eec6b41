"""What a scheduler process reports about itself: its patches, kernels and numerics key.

Read there, after the CUDA graphs are captured, and afresh at each request: a patch that no longer
holds shows. The weights are hashed once, and again after anything has written to them. What ends
the process, or its claims, is left on the launcher's board.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sgl_det import digest, events, metrics, numerics

if TYPE_CHECKING:
    from sgl_det.backend import Backend
    from sgl_det.board import Board
    from sgl_det.patch import PatchSet

backend: Backend | None = None
board: Board | None = None
_weights: str | None = None


def weights_changed() -> None:
    """Forget the digest of the weights; the next report computes it again."""
    global _weights
    _weights = None


def describe(scheduler: Any) -> dict[str, Any]:
    """The worker's half of ``GET /determinism``, for SGLang's ``Scheduler`` object."""
    global _weights
    from sgl_det import plugin

    runner = scheduler.tp_worker.model_runner
    if _weights is None:
        _weights = digest.of_model(runner.model)
    patches = _patches(plugin.active())
    parts = numerics.parts(runner, backend, weights=_weights, patches=patches)
    report = {
        "key": numerics.key(parts),
        "numerics": parts,
        "recorded": numerics.recorded(scheduler),
        "patches": patches,
        "kernels": kernels(),
        "problem": problem(patches),
    }
    if scheduler.server_args.enable_metrics:
        metrics.of_worker(report)
    return report


def idle(scheduler: Any) -> None:
    """Repeat a proof, if it is time; one that no longer holds is told everywhere."""
    from sgl_det.kernels import canary, proof

    known = len(proof.BROKEN)
    if not canary.tick():
        return
    if scheduler.server_args.enable_metrics:
        metrics.of_canary(proof.PROVEN)
        metrics.of_problem(next(iter(proof.BROKEN), None))
    if len(proof.BROKEN) > known:
        _leave("problem", proof.BROKEN[0])
        events.tell("canary_mismatch", reason=proof.BROKEN[-1], **proof.PROVEN["canary"])


@contextmanager
def failures() -> Iterator[None]:
    """Leave the reason of what ends the process where the launcher finds it."""
    try:
        yield
    except Exception as error:
        # What we raise is a sentence; what anything else raises needs its name.
        name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        _leave("failure", name + _first_line(error))
        raise


def _leave(kind: str, sentence: str) -> None:
    if board is not None:
        board.write(kind, sentence)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]


def _patches(applied: PatchSet) -> list[dict[str, Any]]:
    lost = {h.patch.name: h.site for h in applied.verify() if not h.holds}
    return [
        {
            "name": p.name,
            "target": p.target,
            "fingerprint": applied.found[p.name],
            "holds": p.name not in lost,
            **({"lost_at": lost[p.name]} if p.name in lost else {}),
        }
        for p in applied.patches
    ]


def kernels() -> dict[str, Any]:
    """What the start-up proof found, by operator; empty where SGLang's own kernels serve."""
    from sgl_det.kernels import proof

    return dict(proof.PROVEN)


def problem(patches: list[dict[str, Any]]) -> str | None:
    """One sentence on the first patch or proof that does not hold in this process, or None."""
    from sgl_det.kernels import proof

    lost = [p for p in patches if not p["holds"]]
    if not lost:
        return next(iter(proof.BROKEN), None)
    return (
        f"patch {lost[0]['name']} does not hold in the scheduler process: {lost[0]['lost_at']} is "
        f"not our replacement; look for another plugin that patches {lost[0]['target']}"
    )
