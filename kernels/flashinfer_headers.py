"""FlashInfer's kernel headers with a few lines changed, so that a row has one reduction order.

FlashInfer compiles its attention kernels on the user's machine, from headers in its package. Those
are left alone: the lines are changed in a copy, and `with_headers` lets a module be compiled from
the copy. Each change is data (`Edit`), tied to the digits of the function around it, so a release
that changes the function is refused until a person has looked.

How a module is built from the copy
    A build specification of FlashInfer (its ``JitSpec``) has a list of folders that its compiler
    command searches with -I, before the package's own folder, which it searches with -isystem. The
    copy goes there. The specification also gets a name of its own, which FlashInfer uses for the
    folder of the compiled module, for the lock and for the look-up in an ahead-of-time cache. So a
    module built before, or shipped ahead of time by ``flashinfer-jit-cache``, is neither used nor
    overwritten, and no environment variable is needed. (The other way is FLASHINFER_EXTRA_CUDAFLAGS
    with -I and a FLASHINFER_WORKSPACE_BASE of its own: it holds for every module of the process,
    and an ahead-of-time module would be loaded all the same.)

The two groups, and what each is for
    EXACT_RESCALE   a KV tile in which a row sees no key leaves the state as it was, and what is
                    rounded is written down, so that `attention_order` can do the same
    ONE_TREE        query tiles of 16, 64 and 128 rows share one KV tile and one warp a row
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

_PREFILL = "flashinfer/attention/prefill.cuh"
_VERSION = "flashinfer-python>=0.6.15,<0.6.16"


class HeaderError(RuntimeError):
    """A header is not the one that was reviewed; nothing was changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change: ``old``, found once in the function, becomes ``new``."""

    name: str
    file: str  # under the include folder
    function: str  # whose text, from the line of its name to its closing brace, was reviewed
    fingerprint: str  # of that text, before any edit: see `fingerprint`
    old: str
    new: str
    why: str


_in_softmax = partial(Edit, file=_PREFILL, function="update_mdo_states", fingerprint="b7553b97356c")
EXACT_RESCALE = (
    _in_softmax(
        name="exact_rescale",
        old="math::ptx_exp2(m_prev * sm_scale - m[mma_q][j] * sm_scale)",
        new="math::ptx_exp2((m_prev - m[mma_q][j]) * sm_scale)",
        why="the compiler contracts the difference of products to an FMA, which is not 0 when the "
        "maximum stands still: a tile without a visible key would rescale the row",
    ),
    *(
        _in_softmax(
            name=f"one_fma_{i}",
            old=f"s_frag[mma_q][mma_kv][j * 2 + {i}] * sm_scale - m[mma_q][j] * sm_scale",
            new=f"__fmaf_rn(s_frag[mma_q][mma_kv][j * 2 + {i}], sm_scale,\n"
            "                          -__fmul_rn(m[mma_q][j], sm_scale))",
            why="which of the two products is rounded is not left to the compiler",
        )
        for i in (0, 1, 4, 5)
    ),
)
_in_dispatch = partial(
    Edit,
    file=_PREFILL,
    function="BatchPrefillWithPagedKVCacheDispatched",
    fingerprint="60800d92f351",
)
ONE_TREE = (
    _in_dispatch(
        name="one_warp_a_row",
        old="kBf16VOSplit ? 2 : get_num_warps_kv(CTA_TILE_Q);",
        new="kBf16VOSplit ? 2\n"
        "      : (CTA_TILE_Q == 16 && HEAD_DIM_VO < 512) ? 1 : get_num_warps_kv(CTA_TILE_Q);",
        why="with 16 query rows, four warps take a quarter of each KV tile and merge at the end; "
        "with 64 and 128 one warp takes all of it",
    ),
    _in_dispatch(
        name="one_kv_tile",
        old="          : (8 / NUM_MMA_Q);",
        new="          : (HEAD_DIM_VO < 512 ? 4 : 8 / NUM_MMA_Q);",
        why="the KV tile would be 128 keys for 64 query rows and 64 keys for 128",
    ),
    _in_dispatch(
        name="no_smaller_kv_tile",
        old="  if (max_num_mma_kv_smem < 1) {",
        new="  if (max_num_mma_kv_smem < (HEAD_DIM_VO < 512 ? 4 : 1)) {",
        why="a GPU with less shared memory would silently take a smaller KV tile for some query "
        "tiles; the kernel raises instead",
    ),
)
EDITS = (*EXACT_RESCALE, *ONE_TREE)


def fingerprint(text: str) -> str:
    """12 hex digits that name a function's text, trailing spaces aside."""
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def function_text(text: str, name: str) -> str:
    """The one definition of a function: from the line of its name to its closing brace.

    Raises LookupError if there is none or more than one.
    """
    found = []
    for match in re.finditer(rf"^\w[^\n]*\b{name}\(", text, re.MULTILINE):
        body = _closed(text, match.end() - 1, "()")
        rest = re.match(r"\s*\{", text[body:])
        if rest:
            found.append(text[match.start() : _closed(text, body + rest.end() - 1, "{}")])
    if len(found) != 1:
        raise LookupError(f"{len(found)} definitions of {name}")
    return found[0]


def _closed(text: str, opening: int, pair: str) -> int:
    """The position after the bracket that closes the one at ``opening``."""
    depth = 0
    for match in re.compile("[" + re.escape(pair) + "]").finditer(text, opening):
        depth += 1 if match.group() == pair[0] else -1
        if not depth:
            return match.end()
    return len(text)


def edited(texts: dict[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """The texts of the files that the edits name, changed.

    Raises HeaderError with one sentence an edit that does not fit, and changes nothing.
    """
    problems, changed = [], dict(texts)
    for edit in edits:
        try:
            reviewed = function_text(texts[edit.file], edit.function)
            now = function_text(changed[edit.file], edit.function)
        except LookupError as error:
            problems.append(_problem(edit, str(error), "one definition"))
            continue
        found, count = fingerprint(reviewed), now.count(edit.old)
        if found != edit.fingerprint:
            problems.append(_problem(edit, found, edit.fingerprint))
        elif count != 1:
            problems.append(_problem(edit, f"its line {count} times", "once"))
        else:
            text = now.replace(edit.old, edit.new)
            changed[edit.file] = changed[edit.file].replace(now, text)
    if problems:
        raise HeaderError("\n".join(problems))
    return changed


def _problem(edit: Edit, found: str, expected: str) -> str:
    return (
        f"{edit.name}: {edit.function} in {edit.file}: found {found}, expected {expected}: "
        f"install {_VERSION}, or serve another attention backend"
    )


def digits(edits: Iterable[Edit]) -> str:
    """12 hex digits that name what a set of edits does, for folders and for the numerics key."""
    every = repr([(e.file, e.function, e.old, e.new) for e in edits])
    return hashlib.sha256(every.encode()).hexdigest()[:12]


def patched_copy(include: Path, cache: Path, edits: Iterable[Edit] = EDITS) -> Path:
    """A folder under ``cache`` to search before FlashInfer's ``include``; made if it is not there.

    Raises HeaderError where the headers are not those that were reviewed.
    """
    edits = tuple(edits)
    files = {edit.file for edit in edits}
    problems = [f"{include / name} is missing" for name in files if not (include / name).is_file()]
    if problems:
        raise HeaderError(f"{problems[0]}: expected FlashInfer's headers: install {_VERSION}")
    texts = {name: (include / name).read_text(encoding="utf-8") for name in files}
    changed = edited(texts, edits)
    whole = hashlib.sha256(digits(edits).encode())
    for path in sorted(include.rglob("*")):
        if path.is_file():
            whole.update(path.relative_to(include).as_posix().encode() + path.read_bytes())
    target = cache / f"flashinfer-headers-{whole.hexdigest()[:12]}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache, prefix=".headers-"))
    try:
        shutil.copytree(include, made, dirs_exist_ok=True)
        for name, text in changed.items():
            (made / name).write_text(text, encoding="utf-8")
        made.chmod(0o755)
        os.rename(made, target)  # whole, or not at all: several workers may start at once
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def with_headers(spec: Any, copy: Path) -> Any:
    """FlashInfer's build specification of a module, made to compile from the copy."""
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        raise HeaderError(f"FlashInfer's build specification is {spec!r}: install {_VERSION}")
    folders = [copy, *(spec.extra_include_dirs or ())]
    name = f"{spec.name}_{copy.name.rpartition('-')[2]}"
    return dataclasses.replace(spec, name=name, extra_include_dirs=folders)
