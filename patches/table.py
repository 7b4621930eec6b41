"""Patches of SGLang from rows: what every patch of one file has in common is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sgl_det.patch import Patch

SGLANG = "sglang>=0.5.17,<0.5.18"
# name, target, fingerprint, why, wrap; and upstream, where the rows of a file differ in it
Row = tuple[str, str, str, str, Callable] | tuple[str, str, str, str, Callable, str]


def patches_of(prefix: str, rows: Iterable[Row], upstream: str = "") -> tuple[Patch, ...]:
    """One patch a row, named prefix.name; ``upstream`` is that of the rows without their own."""
    return tuple(
        Patch(
            name=f"{prefix}.{name}",
            target=target,
            requires=SGLANG,
            fingerprints=(fingerprint,),
            why=why,
            upstream=own[0] if own else upstream,
            wrap=wrap,
        )
        for name, target, fingerprint, why, wrap, *own in rows
    )
