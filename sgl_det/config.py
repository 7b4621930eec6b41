"""Our own settings: one frozen record, from which the flags and the carrier variable are derived.

The record travels to SGLang's worker processes in one environment variable, as JSON. The variable
is a carrier, not an interface: it names the process that set it, and holds in its tree alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

CARRIER = "SGL_DET_CONFIG"
LINEAR_KERNELS = ("cublaslt", "deep_gemm", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user asked for, and what the launcher found out before it started the workers."""

    allow: tuple[str, ...] = ()
    expect_key: str | None = None
    linear: str = ""
    default_seed: int | None = None
    audit: str | None = None
    canary_s: float = 180.0
    drain_s: float = 300.0
    # Filled in by the launcher once SGLang's own arguments are resolved.
    backend: str | None = None
    board: str | None = None
    owner: int | None = None

    def __post_init__(self) -> None:
        if self.linear and not self.linear.startswith(LINEAR_KERNELS):
            raise ValueError(
                f"no kernel for linear layers is named {self.linear!r}; the names begin with "
                f"{', '.join(LINEAR_KERNELS)}"
            )
        if self.default_seed is not None and not -(2**63) <= self.default_seed < 2**63:
            raise ValueError(
                f"--det-default-seed is {self.default_seed}; expected a 64-bit signed integer"
            )

        if self.expect_key is not None and not re.fullmatch("[0-9a-f]{12}", self.expect_key):
            raise ValueError(
                f"--det-expect-key is {self.expect_key!r}; expected a numerics key of 12 hex "
                f"digits, as GET /determinism and the header of every answer have it"
            )
        for flag, seconds in (("canary", self.canary_s), ("drain", self.drain_s)):
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"--det-{flag}-seconds is {seconds}; expected 0 or more")

    def with_backend(self, backend: str) -> Config:
        return replace(self, backend=backend)

    def publish(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Write the record where child processes find it, with this process as its owner."""
        environ[CARRIER] = json.dumps(asdict(replace(self, owner=os.getpid())))


def withdraw(environ: MutableMapping[str, str] = os.environ) -> None:
    """Take the record out of the environment: processes started from now on are SGLang's own."""
    environ.pop(CARRIER, None)


def published(environ: MutableMapping[str, str] = os.environ) -> Config | None:
    """The record of the launcher or Engine whose process tree this process belongs to, or None."""
    text = environ.get(CARRIER)
    if not text:
        return None
    fields = json.loads(text)
    config = Config(**{**fields, "allow": tuple(fields["allow"])})
    return config if _is_self_or_ancestor(config.owner) else None


def _is_self_or_ancestor(pid: int | None) -> bool:
    import psutil

    return pid is not None and pid in [os.getpid(), *(p.pid for p in psutil.Process().parents())]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags; every name starts with ``--det-``, so none can clash with SGLang's."""
    group = parser.add_argument_group("determinism")
    group.add_argument(
        "--det-allow",
        action="append",
        default=[],
        metavar="NAME",
        help="start although NAME is refused; the claims it touches are dropped (repeatable)",
    )
    group.add_argument(
        "--det-expect-key",
        metavar="KEY",
        help="refuse to serve unless the server's numerics key is KEY",
    )
    group.add_argument(
        "--det-linear",
        default="",
        metavar="KERNEL",
        help="serve linear layers by kernels whose name begins so, where they are proven (cublaslt,"
        " deep_gemm, triton); the bits stay the same, the speed may not",
    )
    group.add_argument(
        "--det-default-seed",
        type=int,
        metavar="N",
        help="a request without a seed gets one that follows from N, its prompt and its sampling "
        "parameters; otherwise each gets a fresh one",
    )
    group.add_argument(
        "--det-canary-seconds",
        type=float,
        default=Config().canary_s,
        metavar="N",
        help="repeat one case of the start-up proof every N seconds in which the server is idle "
        "(%(default)g); 0: never",
    )
    group.add_argument(
        "--det-drain-seconds",
        type=float,
        default=Config().drain_s,
        metavar="N",
        help="after SIGTERM running requests may go on for N seconds (%(default)g)",
    )
    _add_audit(group)


def _add_audit(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--det-audit",
        nargs="?",
        const="audit.json",
        metavar="FILE",
        help="start a server, list the GPU kernels of a prefill and of captured decode steps with "
        "the rule for each, write that to FILE (audit.json), stop; 1 if one is unknown",
    )


def without_audit(argv: Sequence[str]) -> list[str]:
    """The same command line without ``--det-audit`` and its file."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    _add_audit(parser)
    return parser.parse_known_args(list(argv))[1]


def cache_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Where made-up models and proofs are kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl_det"


def split_argv(argv: Sequence[str], prog: str) -> tuple[Config, list[str]]:
    """Our flags as a Config, and everything else verbatim for SGLang."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, add_help=False)
    add_flags(parser)
    ours, rest = parser.parse_known_args(list(argv))
    unknown = next((a for a in rest if a.startswith("--det-")), None)
    if unknown is not None:
        raise ValueError(
            f"unknown flag {unknown.partition('=')[0]}; the --det- flags are "
            f"{', '.join(flags(parser))}"
        )
    config = Config(
        allow=tuple(ours.det_allow),
        expect_key=ours.det_expect_key,
        linear=ours.det_linear,
        default_seed=ours.det_default_seed,
        audit=ours.det_audit,
        canary_s=ours.det_canary_seconds,
        drain_s=ours.det_drain_seconds,
    )
    return config, rest


def flags(parser: argparse.ArgumentParser | None = None) -> list[str]:
    """The names of our flags, in the order in which they are declared."""
    if parser is None:
        parser = argparse.ArgumentParser(add_help=False)
        add_flags(parser)
    return [o for a in parser._actions for o in a.option_strings if o.startswith("--det-")]
