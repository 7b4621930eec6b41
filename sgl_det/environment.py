"""What must be true of this process before SGLang is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from packaging.requirements import Requirement

SGLANG = Requirement("sglang>=0.5.17,<0.5.18")


class Refused(RuntimeError):
    """The server must not start. The text is one sentence for the user."""


def check(environ: MutableMapping[str, str] = os.environ) -> None:
    """Refuse a wrong SGLang and settings that would leave our plugin out of its processes."""
    try:
        found = version(SGLANG.name)
    except PackageNotFoundError:
        raise Refused(f"SGLang is not installed, expected {SGLANG}; install it with pip") from None
    if not SGLANG.specifier.contains(found, prereleases=True):
        raise Refused(
            f"SGLang {found} is installed, expected {SGLANG.specifier}, the versions whose sources "
            f"were reviewed; install one of them, and see `sgl-det check`"
        )
    allowed = environ.get("SGLANG_PLUGINS")
    if allowed and "sgl_det" not in [name.strip() for name in allowed.split(",")]:
        raise Refused(
            f"SGLANG_PLUGINS is {allowed!r}, which leaves out sgl_det and so every patch; "
            f"add sgl_det to it or unset it"
        )
    if environ.get("SGLANG_PLATFORM"):
        raise Refused(
            f"SGLANG_PLATFORM is {environ['SGLANG_PLATFORM']!r}, which makes SGLang skip the "
            f"plugins of all other packages, ours included; unset it"
        )
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        if "sgl_det" not in {e.name for e in entry_points(group=group)}:
            raise Refused(
                f"this installation of sgl-det does not declare the entry point {group}, so SGLang "
                f"would not load it in its workers; install the package with pip"
            )


def use_cpu_if_no_gpu(environ: MutableMapping[str, str] = os.environ) -> bool:
    """True on a machine without a usable GPU, which is then set up for SGLang's CPU engine.

    One OpenMP thread unless the user says otherwise: the scheduler polls, and on few cores more
    threads than cores cost far more than they bring.
    """
    import torch

    if torch.cuda.is_available() and environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return False
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    environ.setdefault("OMP_NUM_THREADS", "1")
    from sgl_det.patches import sgl_kernel_stub

    sgl_kernel_stub.install()
    return True
