"""What must not start: one clear sentence, a non-zero exit, no process left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from support import CPU, arguments

pytestmark = pytest.mark.server
MARK = "SGL_DET_TEST_RUN"


def run(argv, env=None, timeout=300):
    """The launcher in a process of its own: (exit status, our lines, everything, what it left)."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, **CPU, **(env or {}), MARK: mark}
    done = subprocess.run(
        [sys.executable, "-m", "sgl_det.launch_server", *argv],
        capture_output=True,
        text=True,
        env=env,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    output = done.stdout + done.stderr
    ours = [x for x in output.splitlines() if x.startswith("sgl_det: refused: ")]
    return done.returncode, ours, output, left_over(mark)


def left_over(mark: str) -> list[str]:
    time.sleep(0.5)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


@pytest.fixture
def busy_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield str(s.getsockname()[1])


def fake_sglang(folder: Path, version: str) -> str:
    """A path on which importlib.metadata finds another version of SGLang first."""
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return str(folder)


def breaking_plugin(folder: Path) -> str:
    """A plugin that puts an upstream function back in the worker, after ours was applied."""
    info = folder / "hostile-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nzz = hostile:register\n")
    (folder / "hostile.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing

            def register():
                if multiprocessing.parent_process() is None:
                    return
                from sgl_det import plugin
                from sgl_det.config import published
                plugin.activate(published())
                from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod as C
                C.apply = C.apply.__wrapped__
            """
        )
    )
    return str(folder)


def path_with(folder: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


EARLY = {
    "unknown-linear-kernel": (["--det-linear", "cutlass"], {}, "cutlass"),
    "plugins": (["--model-path", "demo"], {"SGLANG_PLUGINS": "other"}, "SGLANG_PLUGINS"),
    "platform": (["--model-path", "demo"], {"SGLANG_PLATFORM": "npu"}, "SGLANG_PLATFORM"),
    "own-flag": (["--model-path", "demo", "--det-alow", "x"], {}, "--det-alow"),
}


@pytest.mark.parametrize("case", EARLY)
def test_refused_before_sglang_is_imported(case):
    argv, env, word = EARLY[case]
    status, ours, output, left = run(argv, env, timeout=60)
    assert status != 0 and len(ours) == 1 and word in ours[0], output
    assert "Traceback" not in output and not left


def test_wrong_sglang_version(tmp_path):
    env = path_with(fake_sglang(tmp_path, "0.5.16"))
    status, ours, output, left = run(["--model-path", "demo"], env, timeout=60)
    assert status == 1 and len(ours) == 1 and not left, output
    assert "0.5.16" in ours[0] and "0.5.17" in ours[0]


def launch_cases(model, port):
    common = list(arguments(model))
    return {
        "unknown-flag": (["--modle-path", "x"], "--model-path"),
        "missing-model": (["--model-path", "/no/such/model", *common[2:]], "/no/such/model"),
        "unknown-backend": ([*common, "--attention-backend", "nope"], "nope"),
        "other-backend": ([*common, "--attention-backend", "intel_amx"], "intel_amx"),
        "port-in-use": ([*common, "--port", port], port),
        "refused-argument": ([*common, "--enable-mixed-chunk"], "mixed"),
        "unknown-allow": ([*common, "--det-allow", "no_such"], "no_such"),
    }


def test_refused_on_resolved_arguments(demo_model, busy_port, tmp_path):
    """Several launches in one process, since each refusal leaves nothing started."""
    cases = launch_cases(demo_model, busy_port)
    script = tmp_path / "cases.py"
    script.write_text(
        "import sys, json\n"
        "from sgl_det.launch_server import main\n"
        "for name, argv in json.loads(sys.argv[1]).items():\n"
        "    print('CASE', name, file=sys.stderr)\n"
        "    print('STATUS', name, main(argv), file=sys.stderr, flush=True)\n"
    )
    import json

    argv = json.dumps({name: a for name, (a, _) in cases.items()})
    done = subprocess.run(
        [sys.executable, str(script), argv],
        capture_output=True,
        text=True,
        env={**os.environ, **CPU},
        timeout=300,
    )
    parts = done.stderr.split("CASE ")[1:]
    assert len(parts) == len(cases), done.stderr[-3000:]
    for part in parts:
        name = part.split()[0]
        ours = [x for x in part.splitlines() if x.startswith("sgl_det: refused: ")]
        assert len(ours) == 1 and cases[name][1] in ours[0], part
        assert f"STATUS {name} 0" not in part and "Traceback" not in part


def test_worker_in_which_a_patch_does_not_hold(demo_model, tmp_path):
    env = path_with(breaking_plugin(tmp_path))
    status, ours, output, left = run([*arguments(demo_model), "--port", "0"], env)
    assert status == 1 and len(ours) == 1 and not left, output[-3000:]
    assert "does not hold" in ours[0] and "UnquantizedLinearMethod.apply" in ours[0]


def test_unexpected_key(demo_model):
    argv = [*arguments(demo_model), "--det-expect-key", "000000000000"]
    status, ours, output, left = run(argv)
    assert status == 1 and len(ours) == 1 and "000000000000" in ours[0], output[-3000:]
    assert not left


def test_plain_sglang_is_untouched(demo_model):
    """With our package installed, SGLang's own launcher loads the plugin and stays as it was."""
    script = (
        "from sgl_det.patches import sgl_kernel_stub; sgl_kernel_stub.install()\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sgl_det import plugin; assert plugin.active() is None\n"
        "from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod as C\n"
        "assert not hasattr(C.apply, '__wrapped__')\n"
    )
    env = {k: v for k, v in {**os.environ, **CPU}.items() if k != "SGL_DET_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
