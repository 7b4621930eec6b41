"""SGLang's offline Engine with the same patches and the same checks as the server."""

from __future__ import annotations

import logging
from typing import Any

from sgl_det import board, config, environment, launch_hook

_log = logging.getLogger("sgl_det")


def Engine(
    *,
    det_allow: tuple[str, ...] = (),
    det_expect_key: str | None = None,
    det_linear: str = "",
    det_default_seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """Start SGLang's offline ``Engine`` deterministically.

    Takes the keyword arguments of ``sglang.Engine``, and ours: refusals to lift, the numerics key
    to insist on, the kernel to prefer for linear layers, and a number from which the seeds of
    requests without one are derived. The result is an ``sglang.Engine``
    with one more method, ``determinism()``, whose answer is that of ``GET /determinism``.

    Workers are started with `spawn`: as with SGLang's own Engine, the calling script needs an
    ``if __name__ == "__main__"`` guard.

    Raises Refused or PatchError, in one sentence, before any worker is started.
    """
    environment.check()
    on_cpu = environment.use_cpu_if_no_gpu()
    from sgl_det import startup

    notes, path = board.create()
    settings = config.Config(
        board=path,
        allow=tuple(det_allow),
        expect_key=det_expect_key,
        linear=det_linear,
        default_seed=det_default_seed,
    )
    startup.load_plugins(settings)
    launch_hook.on_end(lambda asked: _ended(asked, notes.read("failure")))
    try:
        return _start(settings, _completed(kwargs, on_cpu))
    finally:
        config.withdraw()


def _ended(asked: bool, reason: str) -> None:
    """The last words of a process whose engine has ended, and which SGLang ends with it."""
    if not asked:
        _log.critical("sgl_det: the engine ended: %s", reason or "a worker gave no reason")


def _completed(kwargs: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
    from sgl_det.make_model import resolve_model

    if not kwargs.get("enable_deterministic_inference", True):
        raise environment.Refused(
            "enable_deterministic_inference is False, which switches determinism off; "
            "leave it out or use sglang.Engine"
        )
    given = {"log_level": "error", "bf16_gemm_backend": "torch", **kwargs}
    given["enable_deterministic_inference"] = True
    if on_cpu:
        given.setdefault("device", "cpu")
        given.setdefault("attention_backend", "torch_native")
    if "model_path" in given:
        given["model_path"] = str(resolve_model(given["model_path"]))
    return given


def _start(settings: config.Config, kwargs: dict[str, Any]) -> Any:
    from sglang.srt.entrypoints.engine import Engine as Upstream
    from sglang.srt.server_args import ServerArgs

    from sgl_det import startup

    server_args = kwargs.get("server_args") or ServerArgs(**kwargs)
    backend, judgement = startup.decide(server_args, settings)
    launch_hook.on_ready(lambda report: startup.expect_key(settings, report["key"]))

    class DeterministicEngine(Upstream):
        def determinism(self) -> dict[str, Any]:
            """What this engine promises: the answer of ``GET /determinism``."""
            states = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
            return startup.determinism(states[0]["sgl_det"], backend, judgement)

    return DeterministicEngine(server_args=server_args)
