"""The file of a kernel benchmark: one JSON line a case, below one that says where it was measured.

{"machine": {"gpu": ..., "torch": ..., ...}, "bits": "what was compared"}
{"op": ..., "n": ..., "k": ..., "m": ..., "dtype": ..., "tp": ..., "arms": {name: [us, bad]}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgl_det.kernels.proof_cache import version_of


class CaseFile:
    """Continues the file at ``path`` where it ends, or begins it with ``header``.

    fields   what tells one case from another
    Raises ValueError where the file begins with another header: it is left as it is.
    """

    def __init__(self, path: Path, header: dict[str, Any], fields: tuple[str, ...]):
        self._path, self._fields = path, fields
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A line that a time limit cut off is no case: it is measured again.
        whole = text[: text.rfind("\n") + 1]
        header = json.loads(json.dumps(header))
        lines = [json.loads(line) for line in whole.splitlines()] or [header]
        if lines[0] != header:
            raise ValueError(
                f"{path} begins with {json.dumps(lines[0])[:300]}, expected {json.dumps(header)}; "
                f"continue it where it was measured, or name another file"
            )
        path.write_text(whole or json.dumps(header) + "\n", encoding="utf-8")
        self._done = {self._id(entry) for entry in lines[1:]}

    def _id(self, case: dict[str, Any]) -> tuple:
        return tuple(case[field] for field in self._fields)

    def __contains__(self, case: dict[str, Any]) -> bool:
        return self._id(case) in self._done

    def add(self, entry: dict[str, Any]) -> None:
        """Write one case; it is there even if the process ends now."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._done.add(self._id(entry))


def upstream() -> dict[str, str | None]:
    """Versions of the packages whose kernels are the baselines of norms and attention."""
    names = {"sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python", "sglang": "sglang"}
    return {name: version_of(package) for name, package in names.items()}
