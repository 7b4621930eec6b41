"""``python -m sgl_det.launch_server [--det-*] <any SGLang flag>``: SGLang's server, deterministic.

Everything that does not start with ``--det-`` goes to SGLang verbatim.
"""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_det import environment
from sgl_det.config import split_argv, without_audit
from sgl_det.environment import Refused
from sgl_det.patch import PatchError

_USAGE = "python -m sgl_det.launch_server"
_UNKNOWN = "a worker process ended without a reason; see the log above"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; 0 after a normal end, 1 after a refusal, 2 after a usage error.

    With ``--det-audit`` 0 says that every kernel is known, 1 that one is not.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "-h" in argv or "--help" in argv:
        print(_help())
        return 0
    try:
        return _serve(argv)
    except (Refused, PatchError) as error:
        code = 1
        text = str(error)
    except ValueError as error:
        code = 2
        text = str(error)
    _refuse(text)
    return code


def _refuse(text: str) -> None:
    from sgl_det import events

    for line in text.splitlines():
        print(f"sgl_det: refused: {line}", file=sys.stderr, flush=True)
        events.tell("refused", reason=line)


def _serve(argv: list[str]) -> int:
    config, rest = split_argv(argv, _USAGE)
    environment.check()
    on_cpu = environment.use_cpu_if_no_gpu()
    if config.audit is not None:
        return _audit(Path(config.audit), without_audit(argv), on_cpu)
    from sgl_det import board, startup

    notes, path = board.create()
    config = replace(config, board=path)
    startup.load_plugins(config)
    rest = complete(rest, on_cpu)
    server_args = parse(rest)
    backend, judgement = startup.decide(server_args, config)
    _check_port(server_args)
    print(f"sgl_det: sglang.launch_server {startup.masked(rest)}", flush=True)
    print(startup.summary(backend, judgement), flush=True)

    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils import kill_process_tree

    from sgl_det import endpoint, launch_hook, metrics

    startup.tell_lifted(judgement)
    source = endpoint.Determinism(
        lambda r: startup.determinism(r, backend, judgement),
        board=lambda: notes.read("problem"),
        told=metrics.of_launcher if server_args.enable_metrics else lambda answer: None,
    )
    endpoint.install(app, source)
    launch_hook.on_ready(lambda report: _ready(report, source, config))
    launch_hook.on_end(lambda asked: _ended(asked, source.key, notes.read("failure")))
    try:
        run_server(server_args)
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        raise Refused(f"the server stopped during start-up: {_last_words(error)}") from error
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    _ended(True, source.key, "")
    return 0


def _audit(path: Path, argv: list[str], on_cpu: bool) -> int:
    from sgl_det.audit import run

    run.check(path, argv, on_cpu or _value(argv, "--device") == "cpu")
    print(f"sgl_det: audit: starting a server; its log is {run.log_of(path)}", flush=True)
    found = run.audit(path, argv)
    print(found.text(), flush=True)
    print(f"sgl_det: audit: written to {path}", flush=True)
    return 0 if found.passed else 1


def _ready(report: dict[str, Any], source: Any, config: Any) -> None:
    from sgl_det import events, startup

    startup.expect_key(config, report["key"])
    answer = source.take(report)
    print(f"sgl_det: numerics key {report['key']}", flush=True)
    events.tell(
        "ready",
        **{name: answer[name] for name in ("key", "backend", "claims", "lifted")},
        not_claimed=list(answer["not_claimed"]),
        self_test_seconds=answer["kernels"].get("seconds"),
    )


def _ended(asked: bool, key: str, reason: str) -> None:
    """The last words of a server whose processes have ended."""
    from sgl_det import events

    if not key and not asked:
        _refuse(f"the server stopped during start-up: {reason or _UNKNOWN}")
        return
    said = "asked to stop" if asked else reason or _UNKNOWN
    print(f"sgl_det: stopped: {said}", file=sys.stderr, flush=True)
    events.tell("stopped", key=key, asked=asked, reason=said)


def complete(argv: list[str], on_cpu: bool) -> list[str]:
    """SGLang's arguments with what we add: the flag, the CPU's defaults, a made-up model's path."""
    from sgl_det.make_model import resolve_model

    try:
        argv = _with_model_path(argv, resolve_model)
    except OSError as error:  # a sentence of ours on the cache folder
        raise Refused(str(error)) from error
    added = ["--enable-deterministic-inference", "--bf16-gemm-backend", "torch"]
    if on_cpu:
        added += ["--device", "cpu"]
        if _value(argv, "--attention-backend") is None:
            added += ["--attention-backend", "torch_native"]
    missing = []
    for flag, *value in _pairs(added):
        if not any(a == flag or a.startswith(f"{flag}=") for a in argv):
            missing += [flag, *value]
    return [*argv, *missing]


def _pairs(words: list[str]) -> list[list[str]]:
    pairs: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            pairs.append([word])
        else:
            pairs[-1].append(word)
    return pairs


def _value(argv: list[str], *flags: str) -> str | None:
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in flags:
            return value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return None


def _with_model_path(argv: list[str], resolve) -> list[str]:
    flags = ("--model-path", "--model")
    name = _value(argv, *flags)
    if name is None:
        return argv
    path = str(resolve(name))
    out, skip = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if skip:
            out.append(path)
            skip = False
        elif flag in flags and equals:
            out.append(f"{flag}={path}")
        else:
            out.append(word)
            skip = flag in flags
    return out


def parse(argv: list[str]) -> Any:
    """SGLang's resolved ``ServerArgs``. Raises ValueError or Refused with one sentence."""
    import argparse

    from sglang.srt.server_args import ServerArgs, prepare_server_args

    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise ValueError(message)

    parser = Parser(prog=_USAGE, allow_abbrev=True, add_help=False)
    ServerArgs.add_cli_args(parser)
    if "--config" not in argv:
        try:
            _, unknown = parser.parse_known_args(argv)
        except ValueError as error:
            raise ValueError(f"SGLang's arguments: {error}") from None
        if unknown:
            raise ValueError(_unknown_flag(unknown[0], list(parser._option_string_actions)))
    try:
        return prepare_server_args(argv)
    except SystemExit:
        raise ValueError("SGLang did not accept its arguments; see its message above") from None
    except Exception as error:
        from sgl_det.startup import _first_line

        raise Refused(_first_line("SGLang's arguments", error)) from error


def _unknown_flag(word: str, known: list[str]) -> str:
    flag = word.partition("=")[0]
    near = difflib.get_close_matches(flag, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; see `python -m sglang.launch_server --help`"
    return f"unknown argument {flag}, neither a --det- flag nor one of SGLang's{hint}"


def _check_port(server_args: Any) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server_args.host, server_args.port))
        except OSError as error:
            raise Refused(
                f"port {server_args.port} on {server_args.host} cannot be used "
                f"({error.strerror}); choose another with --port"
            ) from None


def _last_words(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _help() -> str:
    import argparse

    from sgl_det.config import add_flags

    parser = argparse.ArgumentParser(
        prog=_USAGE, usage="%(prog)s [--det-*] <any SGLang flag>", add_help=False
    )
    add_flags(parser)
    return (
        parser.format_help()
        + "\nEvery other flag is SGLang's own: see `python -m sglang.launch_server --help`.\n"
        "--model-path also takes the name of a made-up model: see `sgl-det make-model --help`."
    )


if __name__ == "__main__":
    sys.exit(main())
