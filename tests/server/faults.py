"""What goes wrong around a server, and what is looked at before and after."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

import sampled
from sgl_det.server_process import ServerProcess
from support import python_path

NAMES = ("plain", "greedy", "penalties")
NEW = 40


def body(name: str, **more) -> dict:
    """One of the requests whose bits are compared."""
    params = {**sampled.parameters(name), "max_new_tokens": NEW}
    ask = {"return_logprob": True, "top_logprobs_num": 3}
    return {"input_ids": sampled.prompt(name), "sampling_params": params, **ask, **more}


def answers(url: str) -> dict:
    """The bits of each of them, one after the other."""
    return {name: sampled.bits(sampled.post(url, "/generate", body(name))) for name in NAMES}


def series(url: str) -> dict[tuple[str, ...], float]:
    """What ``/metrics`` tells of ours: (name, label value, ...) -> value."""
    text = requests.get(f"{url}/metrics", timeout=60).text
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k != "pid")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("sgl_det_")
    }


def until(true: Callable[[], object], seconds: float = 60.0) -> object:
    """The first true answer, asked again and again; fails when time is over."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.1)
    return found


def tree(server: ServerProcess) -> list[psutil.Process]:
    """The server's process and everything that it started."""
    root = psutil.Process(server.pid)
    return [root, *root.children(recursive=True)]


def scheduler_of(server: ServerProcess) -> psutil.Process:
    return next(p for p in tree(server) if "scheduler" in " ".join(p.cmdline()))


def nothing_left(processes: list[psutil.Process]) -> bool:
    """Whether all have ended, a zombie (which nobody has waited for yet) among them."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def events(server: ServerProcess, name: str) -> list[dict]:
    """The events of a name in the server's log."""
    lines = server.log.read_text(errors="replace").splitlines()
    found = [json.loads(x) for x in lines if x.startswith('{"sgl_det": ')]
    return [e for e in found if e["sgl_det"] == name]


@contextmanager
def stuck_reader(server: ServerProcess, tokens: int = 400) -> Iterator[socket.socket]:
    """A client that asks for a stream, of 13 kB a token at least, and reads its first byte only."""
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    asked = {"input_ids": sampled.prompt("stuck"), "sampling_params": params, "stream": True}
    text = json.dumps(asked | {"return_logprob": True, "top_logprobs_num": 300}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(120)
        client.connect(("127.0.0.1", server.port))
        client.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        client.recv(1)
        yield client


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A file system in memory on which not even a small library has room. Root only."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def may_mount() -> bool:
    """Whether this process may make file systems; a container's root often may not."""
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    return done.returncode == 0


# A plugin that gives the worker another kernel when it is told to: sums in another order.
OTHER_KERNEL = """
import signal

def other(*_):
    from sgl_det.kernels import cpu
    original = cpu.linear

    def linear(x, weight, bias=None, out_dtype=None):
        at = weight.shape[1] // 2
        parts = ((t[..., :at].contiguous(), t[..., at:].contiguous()) for t in (x, weight))
        (x0, x1), (w0, w1) = parts
        return original(x0, w0, bias, out_dtype) + original(x1, w1, None, out_dtype)

    cpu.linear = linear

def register():
    import multiprocessing
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGUSR2, other)
"""


def plugin(folder: Path, text: str) -> dict[str, str]:
    """The environment in which SGLang finds a plugin of this text."""
    info = folder / "hostile-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nhostile = hostile:register\n")
    (folder / "hostile.py").write_text(text)
    return python_path(folder)
