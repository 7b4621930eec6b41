"""What a scheduler process reports about itself: its patches, kernels and numerics key.

Read there, after the CUDA graphs are captured, and afresh at each request: a patch that no longer
holds shows. The weights are hashed once, and again after anything has written to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_det import digest, numerics

if TYPE_CHECKING:
    from sgl_det.backend import Backend
    from sgl_det.patch import PatchSet

backend: Backend | None = None
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
    return {
        "key": numerics.key(parts),
        "numerics": parts,
        "recorded": numerics.recorded(scheduler),
        "patches": patches,
        "kernels": kernels(),
        "problem": problem(patches),
    }


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
