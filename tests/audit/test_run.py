"""From the command line to the exit status, with a small HTTP server in place of SGLang's."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from audit_support import PROOFS, lines

from sgl_det import environment, launch_server
from sgl_det.audit import drive, run

ANSWER = {"key": "0123456789ab", "backend": "fa3", "kernels": PROOFS, "claims": []}
SPLIT_K = "_matmul_splitk_kernel"


class Upstream:
    """Answers as the server does and leaves a trace at /stop_profile; what was asked is kept."""

    def __init__(self, leave_trace, answer) -> None:
        self.asked, self.folder, self.refuse = [], None, None
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(answer)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                upstream.asked.append((self.path, json.loads(body or "{}")))
                upstream.token = self.headers["Authorization"]
                if self.path == "/start_profile":
                    upstream.folder = Path(upstream.asked[-1][1]["output_dir"])
                if self.path == "/stop_profile":
                    leave_trace(upstream.folder)
                self.reply({})

            def reply(self, content):
                status = 401 if self.path == upstream.refuse else 200
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode() if status == 200 else b"no key")

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def names():
    """The kernels that the trace will hold; a test may add some."""
    return [name for _, name in lines("known.tsv")]


@pytest.fixture
def upstream(trace, names):
    found = Upstream(lambda folder: names and trace(names, folder), ANSWER)
    yield found
    found.close()


class Process:
    """Stands for ServerProcess: the server is there already, or its log says why it is not."""

    made = None

    def __init__(self, upstream, log_text=None) -> None:
        self.url, self.log_text, self.stopped = upstream.url, log_text, False

    def __call__(self, module, argv, *, log, env):
        self.module, self.argv, self.log, self.env = module, argv, log, env
        return self

    def start(self):
        return self

    def wait_ready(self, timeout):
        if self.log_text is not None:
            self.log.write_text(self.log_text)
            raise RuntimeError("server ended with 1 during start-up:\nthe tail of its log")
        return self

    def stop(self):
        self.stopped = True


@pytest.fixture
def launch(monkeypatch, tmp_path, upstream):
    """Runs the launcher's main with --det-audit; returns (status, process)."""
    monkeypatch.setattr(environment, "check", lambda: None)
    monkeypatch.setattr(environment, "use_cpu_if_no_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)

    def call(*argv, log_text=None):
        process = Process(upstream, log_text)
        monkeypatch.setattr(run, "ServerProcess", process)
        return launch_server.main(["--model-path", "demo", *argv]), process

    return call


def test_known_kernels_exit_0(launch, upstream, tmp_path, capsys):
    status, process = launch("--det-allow", "x", "--det-audit")
    shown = capsys.readouterr().out
    assert status == 0 and process.stopped
    assert "PASSED" in shown and "audit.json.log" in shown and "fa3.one_pass" in shown
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["passed"] and len(found["kernels"]) == len(lines("known.tsv"))
    assert process.module == "sgl_det.launch_server" and process.log.name == "audit.json.log"
    assert process.argv[:4] == ["--model-path", "demo", "--det-allow", "x"]
    token = process.argv[process.argv.index("--api-key") + 1]
    assert upstream.token == f"Bearer {token}" and "--det-audit" not in process.argv


def test_planted_split_k_exits_1(launch, names, tmp_path, capsys):
    names.append(SPLIT_K)
    status, process = launch("--det-audit", "found.json")
    assert status == 1 and process.stopped
    shown = capsys.readouterr().out
    assert "FAILED" in shown and f"names = ['{SPLIT_K}']" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert [k["name"] for k in found["kernels"] if k["class"] == "unknown"] == [SPLIT_K]


def test_what_is_asked(launch, upstream):
    """The same requests before the profile and in it, on other tokens; greedy, long and in bulk."""
    launch("--det-audit")
    paths = [path for path, _ in upstream.asked]
    start, stop = paths.index("/start_profile"), paths.index("/stop_profile")
    assert paths == ["/generate"] * start + ["/start_profile"] + ["/generate"] * start + [
        "/stop_profile"
    ]
    asked = dict(upstream.asked)["/start_profile"]
    assert asked["activities"] == ["GPU"] and asked["with_stack"] is False
    before = [body["input_ids"] for _, body in upstream.asked[:start]]
    during = [body["input_ids"] for _, body in upstream.asked[start + 1 : stop]]
    assert [len(ids) for ids in during] == [200, 24] and len(before[0]) == 200
    firsts = [
        p[0] for ids in (*before, *during) for p in (ids if isinstance(ids[0], list) else [ids])
    ]
    assert len(set(firsts)) == len(firsts)
    assert all(b["return_logprob"] for _, b in upstream.asked if "input_ids" in b)


def test_sampled_requests_where_claimed():
    bodies = drive.bodies(["sampled"], first=0)
    seeds = [b["sampling_params"].get("sampling_seed") for b in bodies]
    assert len(bodies) == 2 * len(drive.bodies([], first=0)) and seeds == [None, None, 1, 1]
    flat = [
        token
        for b in bodies
        for p in b["input_ids"]
        for token in (p if isinstance(p, list) else [p])
    ]
    assert all(0 < token < 256 for token in flat)


def refused(capsys) -> list[str]:
    return [x for x in capsys.readouterr().err.splitlines() if x.startswith("sgl_det: refused: ")]


def test_no_gpu(launch, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(environment, "use_cpu_if_no_gpu", lambda: True)
    status, process = launch("--det-audit")
    (line,) = refused(capsys)
    assert status == 1 and "GPU" in line and "nothing to audit" in line
    assert not hasattr(process, "module") and not list(tmp_path.glob("audit*"))


BEFORE = {
    "cpu-device": (["--device", "cpu", "--det-audit"], 1, "nothing to audit"),
    "no-folder": (["--det-audit", "no/such/a.json"], 2, "folder that exists"),
    "folder": (["--det-audit", "."], 2, "folder that exists"),
    "ssl": (["--ssl-certfile", "x", "--det-audit"], 2, "--ssl-certfile"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_refused_before_a_server_is_started(launch, capsys, case):
    argv, expected, word = BEFORE[case]
    status, process = launch(*argv)
    (line,) = refused(capsys)
    assert status == expected and word in line and not hasattr(process, "module")


def test_refusal_of_the_server_is_passed_on(launch, capsys, tmp_path):
    text = "loading\nsgl_det: refused: the model is a mixture of experts; choose another\n"
    status, process = launch("--det-audit", log_text=text)
    assert refused(capsys) == [text.splitlines()[1]]
    assert status == 1 and process.stopped and not (tmp_path / "audit.json").exists()


def test_server_that_ends_without_a_reason(launch, capsys):
    status, process = launch("--det-audit", log_text="Segmentation fault\n")
    (line,) = refused(capsys)
    assert status == 1 and "ended with 1" in line and "audit.json.log" in line and process.stopped


@pytest.mark.parametrize("path", ["/determinism", "/start_profile", "/generate", "/stop_profile"])
def test_request_that_is_refused(launch, upstream, capsys, path):
    upstream.refuse = path
    status, process = launch("--det-audit")
    (line,) = refused(capsys)
    assert status == 1 and f"{path} was answered 401: no key" in line and process.stopped


def test_no_trace(launch, names, capsys):
    names.clear()
    status, process = launch("--det-audit")
    (line,) = refused(capsys)
    assert status == 1 and "no trace" in line and process.stopped


def test_port_of_the_user_is_not_used(launch):
    """The real ServerProcess adds its own port last; ours add host and keys after the user's."""
    _, process = launch("--port", "1", "--host", "0.0.0.0", "--det-audit")
    assert process.argv.index("127.0.0.1") > process.argv.index("0.0.0.0")
