"""Every real patch against the upstream that is installed: by file, and by the loaded function."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sgl_det import backend
from sgl_det.check import FITS, judge_all
from sgl_det.patch import PatchSet
from sgl_det.patches import all_patches, for_launcher, for_worker
from support import CPU

# Loads the targets as a server on the CPU does, checks them, and tells the digits and the failures.
_INSPECT = """
import json
from sgl_det.patch import PatchError, PatchSet
from sgl_det.patches import all_patches, sgl_kernel_stub
from sgl_det.sources import fingerprint
from sgl_det.bindings import resolve

sgl_kernel_stub.install()
told = {}
for patch in {p.name: p for p in all_patches()}.values():
    try:
        PatchSet([patch]).check()
        told[patch.name] = fingerprint(resolve(patch.target).value)
    except PatchError as error:
        told[patch.name] = str(error)
print(json.dumps(told))
"""


def _by_name():
    return {p.name: p for p in all_patches()}


@pytest.mark.parametrize("name", _by_name())
def test_patch_fits_what_is_installed(name):
    (verdict,) = judge_all([_by_name()[name]])
    assert verdict.verdict == FITS, verdict


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    """Patch name -> the digits that ``inspect`` sees, or why the patch was refused."""
    child = subprocess.run(
        [sys.executable, "-c", _INSPECT],
        env={**os.environ, **CPU},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", _by_name())
def test_loaded_function_has_the_fingerprint_of_its_file(loaded, name):
    patch = _by_name()[name]
    if "cannot be imported" in loaded[name] and patch.distribution != "sglang":
        pytest.skip("the target's module cannot be imported on a machine without a GPU")
    (verdict,) = judge_all([patch])
    assert loaded[name] == verdict.detail


def test_one_patch_per_target_in_each_process():
    """The patches of one process never meet on one target or name."""
    PatchSet(for_launcher(hook=None))
    for each in backend.BACKENDS.values():
        PatchSet((*for_worker(observer=None), *each.patches()))


def test_patches_of_one_name_are_one_patch():
    facts: dict[str, tuple] = {}
    for p in all_patches():
        mine = (p.target, p.requires, p.fingerprints, p.why, p.upstream)
        assert facts.setdefault(p.name, mine) == mine
