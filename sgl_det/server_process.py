"""A server in a process of its own: start it, wait until it answers, stop it with its children."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests


class ServerProcess:
    """``python -m MODULE <argv> --port PORT``, its output in a log file.

    Use as a context manager, or call ``start``, ``wait_ready`` and ``stop``; several at once with
    `running`.
    """

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        *,
        log: Path,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        self.command = [sys.executable, "-m", module, *argv, "--port", str(self.port)]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen | None = None

    def start(self) -> ServerProcess:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float = 300.0) -> ServerProcess:
        """Wait until ``/health`` answers. Raises RuntimeError with the end of the log."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"server ended with {self._process.returncode} during start-up:\n{self.tail()}"
                )
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"server did not answer within {timeout:.0f} s:\n{self.tail()}")

    def wait_exit(self, timeout: float = 300.0) -> int:
        """The exit status of a server that is expected to end by itself."""
        return self._process.wait(timeout)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the server and everything that it started."""
        if self._process is None:
            return
        try:
            tree = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in tree:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(tree, timeout=10)
        self._process = None

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> ServerProcess:
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_exc) -> None:
        self.stop()


@contextmanager
def running(servers: Iterable[ServerProcess], timeout: float = 300.0) -> Iterator[None]:
    """Servers that come up side by side; they are ready in the block, and stopped after it."""
    servers = tuple(servers)
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(timeout)
        yield
    finally:
        for server in servers:
            server.stop()


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
