"""Rules about the code itself: layering, sizes, forbidden calls, frozen names; by syntax tree."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_det import ledger
from sgl_det.patches import all_patches

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sgl_det": "sgl_det", "patches": "sgl_det.patches", "kernels": "sgl_det.kernels"}
OURS = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
ALL = sorted({*OURS, *(p for f in ("tests", "benchmarks") for p in (ROOT / f).rglob("*.py"))})

# Where a setting has to be read from, or handed to, a process's environment.
READ_THE_ENVIRONMENT = {
    "sgl_det/config.py",
    "sgl_det/environment.py",
    "sgl_det/launch_hook.py",
    "sgl_det/make_model/cache.py",
    "sgl_det/numerics.py",
    "sgl_det/plugin.py",
    "sgl_det/server_process.py",
    "sgl_det/startup.py",
    "sgl_det/stock.py",
    "kernels/cpu_build.py",
}
# What a person runs, and what must speak before there is a log.
PRINT = {
    "sgl_det/bench/verb.py",
    "sgl_det/check.py",
    "sgl_det/cli.py",
    "sgl_det/demo.py",
    "sgl_det/launch_server.py",
    "sgl_det/ledger.py",
    "sgl_det/make_model/verb.py",
    "sgl_det/plugin.py",
    "sgl_det/probe/verb.py",
    "sgl_det/readme.py",
    "sgl_det/report.py",
    "sgl_det/soak/verb.py",
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((FOLDERS[folder], *(p for p in rest if p != "__init__")))


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, anywhere in it, names out of modules included."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parents, base)).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _inside(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def _calls(path: Path) -> Iterator[str]:
    """The dotted names that a file calls or reads: ``print``, ``torch.equal``, ``os.environ``."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield f"{ast.unparse(node.func)}()"


def _in(folder: str) -> list[Path]:
    return [p for p in ALL if _name(p).startswith(f"{folder}/")]


def test_kernels_import_only_kernels():
    for path in _in("kernels"):
        for name in _imports(path):
            if _inside(name, "sgl_det", "sglang", "flashinfer", "patches"):
                assert _inside(name, "sgl_det.kernels"), f"{_name(path)} imports {name}"


def test_patches_import_only_the_patch_core_and_kernels():
    allowed = ("sgl_det.patch", "sgl_det.patches", "sgl_det.kernels")
    for path in _in("patches"):
        for name in _imports(path):
            if _inside(name, "sgl_det"):
                assert _inside(name, *allowed), f"{_name(path)} imports {name}"


def test_patch_core_is_a_leaf():
    """patch.py, with the two readers it is made of, needs nothing but packaging."""
    core = {"sgl_det.patch", "sgl_det.bindings", "sgl_det.sources"}
    for module in core:
        for name in _imports(ROOT / f"{module.replace('.', '/')}.py"):
            top = name.partition(".")[0]
            fine = top in sys.stdlib_module_names or top == "packaging" or _inside(name, *core)
            assert fine, f"{module} imports {name}"


def test_mechanism_does_not_import_its_users():
    """launch_server, the plugin and the Engine stand on the backends, not under them."""
    users = {"launch_server", "plugin", "engine", "cli", "demo"}
    for module in ("backend", "axis", "config", "numerics", "check", "ledger", "arguments"):
        for name in _imports(ROOT / "sgl_det" / f"{module}.py"):
            assert not _inside(name, *(f"sgl_det.{u}" for u in users)), f"{module} imports {name}"


def test_no_reduction_order_sees_the_batch():
    forbidden = {"m", "batch", "batch_size", "num_tokens", "num_seqs", "grid"}
    for path in ALL:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef) and "reduction_order" in node.name:
                args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                names = {a.arg.lower() for a in args}
                assert not names & forbidden, f"{_name(path)}: {node.name} takes {names}"
                assert not (node.args.vararg or node.args.kwarg), f"{_name(path)}: {node.name}"


_IMPORT = """
import json, os, sys, threading, time
environment, started = dict(os.environ), time.process_time()
import {module}
seconds = time.process_time() - started
print(json.dumps({{
    "seconds": seconds,
    "heavy": sorted({{"torch", "sglang", "triton", "flashinfer", "numpy"}} & set(sys.modules)),
    "threads": threading.active_count(),
    "environment": environment == dict(os.environ),
}}))
"""


@pytest.mark.parametrize(
    "module", ["sgl_det", "sgl_det.patch", "sgl_det.patches", "sgl_det.backend", "sgl_det.plugin"]
)
def test_import_has_no_effect(module):
    """Processor seconds, the best of three, since the machine may be busy."""
    runs = []
    for _ in range(3):
        child = subprocess.run(
            [sys.executable, "-c", _IMPORT.format(module=module)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert child.returncode == 0 and child.stderr == "", child.stderr
        runs.append(json.loads(child.stdout))  # one line of JSON: the import itself printed nothing
    for run in runs:
        assert (run["heavy"], run["threads"], run["environment"]) == ([], 1, True)
    assert min(run["seconds"] for run in runs) < 0.5


def test_public_names_are_frozen():
    import sgl_det

    assert sgl_det.__all__ == sorted(
        ["Axis", "Engine", "Patch", "PatchError", "PatchSet", "__version__", "make_model"]
    )


def test_verbs_and_flags_are_frozen():
    """A new verb or flag is a decision: add it here and to the README."""
    from sgl_det import cli, config

    verbs = {"serve", "check", "probe", "soak", "bench", "make-model"}
    assert {"serve", *cli.VERBS} == verbs
    assert config.flags() == [
        "--det-allow",
        "--det-expect-key",
        "--det-linear",
        "--det-default-seed",
        "--det-canary-seconds",
        "--det-drain-seconds",
        "--det-audit",
    ]


def test_every_verb_has_its_two_functions():
    from sgl_det import cli

    for verb, (module, _) in cli.VERBS.items():
        tree = _tree(ROOT / f"{module.replace('.', '/')}.py")
        found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert {"add_arguments", "run"} <= found, verb


def test_ledger_is_up_to_date():
    text = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    assert text == ledger.render(all_patches()), "run python -m sgl_det.ledger"


@pytest.mark.parametrize("path", ALL, ids=_name)
def test_file_and_functions_are_short(path):
    """300 lines a file and 60 a function, unless its docstring says why it is longer."""
    text, tree = path.read_text(encoding="utf-8"), _tree(path)
    excused = "Longer than 300 lines because" in (ast.get_docstring(tree) or "")
    assert excused or text.count("\n") <= 300
    long = [
        f"{node.name}: {length} lines"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := node.end_lineno - node.lineno + 1) > 60
        and "Longer than 60 lines because" not in (ast.get_docstring(node) or "")
    ]
    assert not long


def _broken(paths, pattern: str, allowed=frozenset()) -> list[str]:
    return sorted(
        f"{_name(p)}: {call}"
        for p in paths
        if _name(p) not in allowed
        for call in _calls(p)
        if re.fullmatch(pattern, call)
    )


def test_kernels_have_no_atomics_and_no_autotuning():
    """Both let the order of a sum depend on the moment."""
    assert not _broken(_in("kernels"), r"(triton\.autotune|tl\.atomic_\w+)(\(\))?")


def test_the_environment_is_read_in_named_places():
    assert not _broken(OURS, r"os\.(environ|getenv|putenv)", READ_THE_ENVIRONMENT)


def test_prints_are_in_named_places():
    assert not _broken(OURS, r"print\(\)", PRINT)


def test_bits_are_compared_by_the_one_assertion():
    """``torch.equal`` takes 0.0 for -0.0, ``allclose`` takes near for equal, and a rerun hides."""
    assert not _broken(_in("tests"), r"(torch\.equal|.*\ballclose|.*\bflaky)(\(\))?")


def test_patches_and_kernels_do_not_swallow_exceptions():
    """But for those that answer a client with what would otherwise end the scheduler."""
    answered = {ROOT / "patches" / name for name in ("scheduler.py", "logit_processors.py")}
    for path in {*_in("patches"), *_in("kernels")} - answered:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                assert caught not in ("", "Exception", "BaseException"), _name(path)


@pytest.mark.parametrize("path", ALL, ids=_name)
def test_every_file_says_what_it_is_for(path):
    if path.read_text(encoding="utf-8").strip():
        assert ast.get_docstring(_tree(path))
