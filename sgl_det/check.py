"""``sgl-det check``: does each patch fit what is installed, or wheels given by path?

Reads source files only; neither SGLang, FlashInfer nor torch is imported, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sgl_det.patch import Patch
from sgl_det.sources import Source, installed, wheel

FITS = "fits"
DOES_NOT_FIT = "does not fit"
GONE = "target gone"
# Read, not called: a replacement function would not be used alike.
_PROPERTIES = ("property", "cached_property", "functools.cached_property")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one patch fits one distribution; ``detail`` says what was found and expected."""

    name: str
    target: str
    distribution: str
    version: str | None
    verdict: str
    detail: str


def judge(patch: Patch, source: Source | None) -> Verdict:
    """The verdict on one patch; ``source`` is its distribution, None if that is not installed."""

    def say(verdict: str, detail: str) -> Verdict:
        found = source.version if source else None
        return Verdict(patch.name, patch.target, patch.distribution, found, verdict, detail)

    if source is None:
        return say(DOES_NOT_FIT, f"{patch.distribution} is not installed, needs {patch.requires}")
    reviewed = ", ".join(patch.fingerprints)
    try:
        in_range = patch.accepts(source.version)
        definitions = source.definitions(patch.target)
    except (InvalidVersion, ValueError) as error:
        return say(DOES_NOT_FIT, str(error))
    if not definitions:
        return say(GONE, f"no def of it in {source.distribution} {source.version}")
    found = ", ".join(dict.fromkeys(d.fingerprint for d in definitions))
    problems = []
    if not in_range:
        problems.append(f"{source.distribution} is {source.version}, needs {patch.requires}")
    if any(d.fingerprint not in patch.fingerprints for d in definitions):
        problems.append(f"source is {found}, reviewed {reviewed}")
    elif not in_range:
        problems.append("its source is the reviewed one")
    if any(set(d.decorators) & set(_PROPERTIES) for d in definitions):
        problems.append("it is a property, only functions can be replaced")
    return say(DOES_NOT_FIT, "; ".join(problems)) if problems else say(FITS, found)


def judge_all(patches: Iterable[Patch], wheels: Iterable[Path] = ()) -> list[Verdict]:
    """Verdicts on the patches for what is installed or, if wheels are given, for those alone.

    Raises ValueError for a path that is not a wheel or has no patch.
    """
    by_name = {p.name: p for p in patches}
    sources = [wheel(path) for path in wheels]
    if not sources:
        found: dict[str, Source | None] = {}
        for p in by_name.values():
            package = p.target.partition(":")[0].partition(".")[0]
            found.setdefault(p.distribution, installed(p.distribution, package))
        return [judge(p, found[p.distribution]) for p in by_name.values()]
    verdicts = []
    for source in sources:
        mine = [p for p in by_name.values() if _same(p.distribution, source.distribution)]
        if not mine:
            known = sorted({p.distribution for p in by_name.values()})
            raise ValueError(
                f"no patch is for {source.distribution}: give wheels of {' or '.join(known)}"
            )
        verdicts += [judge(p, source) for p in mine]
    return verdicts


def _same(one: str, other: str) -> bool:
    return canonicalize_name(one) == canonicalize_name(other)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wheel",
        action="append",
        nargs="+",
        default=[],
        type=Path,
        metavar="PATH",
        help="a wheel of sglang or flashinfer-python, or a folder with its contents (repeatable); "
        "patches of other distributions are then not judged",
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print one line per patch; 0 if every judged patch fits, 1 otherwise."""
    from sgl_det.patches import all_patches

    try:
        verdicts = judge_all(all_patches(), [path for group in args.wheel for path in group])
    except ValueError as error:
        print(f"sgl-det check: {error}", file=sys.stderr)
        return 1
    fits = sum(v.verdict == FITS for v in verdicts)
    if args.json:
        print(json.dumps({"fits": fits == len(verdicts), "patches": [*map(asdict, verdicts)]}))
    else:
        _print_table(verdicts)
        print(f"{fits} of {len(verdicts)} patches fit")
    return int(fits != len(verdicts))


def _print_table(verdicts: list[Verdict]) -> None:
    name = max(len(v.name) for v in verdicts)
    mark = max(len(v.verdict) for v in verdicts)
    for v in verdicts:
        where = f"{v.distribution} {v.version or '(none)'}"
        print(f"{v.verdict:{mark}}  {v.name:{name}}  {where}  {v.target}")
        if v.verdict != FITS:
            print(f"{'':{mark}}  {v.detail}")
