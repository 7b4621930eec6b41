"""What runs inside SGLang's processes: the two entry points, and the patches that they apply.

Both entry points are called in every SGLang process of an environment that has this package. They
do nothing unless our launcher or Engine started the process tree. SGLang logs and swallows
exceptions raised here, so a patch that does not fit ends the process: there is no fallback.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from sgl_det.config import Config, cache_folder, published
from sgl_det.patch import Patch, PatchError, PatchSet

if TYPE_CHECKING:
    from sgl_det.backend import Backend
    from sgl_det.board import Board

_active: PatchSet | None = None


def active() -> PatchSet | None:
    """The patches applied in this process, or None."""
    return _active


def before_platform() -> None:
    """Entry point ``sglang.srt.platforms``: runs before the imports that need ``sgl_kernel``.

    Returns None, which tells SGLang that we bring no hardware platform of our own.
    """
    if published() is not None and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from sgl_det.patches import sgl_kernel_stub

        sgl_kernel_stub.install()


def register() -> None:
    """Entry point ``sglang.srt.plugins``: patch the launcher's process or one of its workers."""
    config = published()
    if config is None:
        return
    try:
        activate(config)
    except Exception as error:  # whatever it is, SGLang would log it and serve unpatched
        reason = error if isinstance(error, PatchError) else repr(error)
        print(f"sgl_det: refused: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def activate(config: Config) -> PatchSet:
    """Apply this process's patches, once. Raises PatchError, with nothing changed, on a misfit."""
    global _active
    if _active is None:
        from sgl_det import launch_hook, patches, worker
        from sgl_det.backend import BACKENDS
        from sgl_det.kernels import proof

        _allow_backends()
        if config.owner == os.getpid():
            found = PatchSet(patches.for_launcher(launch_hook))
        else:
            worker.board = _board(config.board) if config.board else None
            worker.backend = BACKENDS[config.backend]
            proof.SETTINGS.linear = config.linear
            proof.SETTINGS.cache = cache_folder() / "proofs"
            proof.SETTINGS.canary_s = config.canary_s
            found = PatchSet(patches_of_worker(worker.backend))
        found.apply()
        _active = found
    return _active


def _board(path: str) -> Board:
    from sgl_det import board

    try:
        return board.at(path)
    except OSError as error:
        raise PatchError(
            f"the launcher's board {path} cannot be opened ({error.strerror}), expected that "
            f"processes of one user see each other in /proc; mount it without hidepid"
        ) from error


def patches_of_worker(backend: Backend) -> tuple[Patch, ...]:
    """The patches that a scheduler process applies when it runs this backend."""
    from sgl_det import patches, worker

    return (*patches.for_worker(worker), *backend.patches())


def _allow_backends() -> None:
    """Let SGLang accept its deterministic flag, and the radix cache, with each backend of ours."""
    from sglang.srt import server_args

    from sgl_det.backend import BACKENDS

    for known, add in (
        (
            server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            server_args.add_deterministic_attention_backend_choices,
        ),
        (
            server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            server_args.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        add([name for name in BACKENDS if name not in known])
