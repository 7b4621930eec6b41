"""``--det-audit``: a server of its own for the audit, from its start to the verdict."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sgl_det.audit import drive, kernels_seen, report, rules
from sgl_det.environment import Refused
from sgl_det.server_process import ServerProcess

_MARK = "sgl_det: refused: "
_SECONDS = 1800.0  # the first start compiles kernels


def log_of(path: Path) -> Path:
    """Where the server's output goes: beside the report."""
    return path.with_name(f"{path.name}.log")


def check(path: Path, argv: Sequence[str], on_cpu: bool) -> None:
    """Refuse what cannot be audited before anything is started."""
    if on_cpu:
        raise Refused(
            "--det-audit lists GPU kernels, and this server would run without a GPU: nothing to "
            "audit"
        )
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise ValueError(f"--det-audit {path}: give a file in a folder that exists")
    encrypted = next((a for a in argv if a.startswith("--ssl-")), None)
    if encrypted is not None:
        raise ValueError(f"--det-audit talks plain HTTP to its server; leave out {encrypted}")


def audit(path: Path, argv: Sequence[str]) -> report.Report:
    """Start the server, record it, stop it; the report is also written to ``path``.

    argv    the launcher's arguments without --det-audit
    Raises Refused if the server does not start or does not do as it is asked.
    """
    known = rules.load()
    token = secrets.token_hex(16)
    ours = ["--host", "127.0.0.1", "--api-key", token, "--admin-api-key", token]
    server = ServerProcess(
        "sgl_det.launch_server",
        [*argv, *ours],
        log=log_of(path),
        # The profiler's other version in SGLang 0.5.17 names its files differently.
        env={"SGLANG_PROFILE_V2": "0"},
    )
    with tempfile.TemporaryDirectory(prefix="sgl_det_audit_") as folder:
        try:
            server.start().wait_ready(_SECONDS)
            answer = drive.drive(server.url, token, Path(folder))
            events = kernels_seen.read_folder(Path(folder))
        except (RuntimeError, ValueError) as error:
            raise Refused(_why(log_of(path), error)) from error
        finally:
            server.stop()
    about = {"model": answer.get("recorded", {}).get("model_path")}
    found = report.judge(kernels_seen.kernels(events), known, answer, about)
    path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return found


def _why(log: Path, error: Exception) -> str:
    """The server's own refusals, or what went wrong and where to look."""
    if not isinstance(error, drive.AuditError) and log.is_file():
        lines = log.read_text(errors="replace").splitlines()
        refusals = [x.removeprefix(_MARK) for x in lines if x.startswith(_MARK)]
        if refusals:
            return "\n".join(refusals)
    return f"{str(error).splitlines()[0].rstrip(':')}; its log is {log}"
