"""From the user's arguments to a server that may start, shared by the launcher and the Engine."""

from __future__ import annotations

import os
from typing import Any

from sgl_det import plugin
from sgl_det.backend import BACKENDS, Backend
from sgl_det.config import Config
from sgl_det.environment import Refused
from sgl_det.refusals import Judgement, judge

_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "hf_token")


def load_plugins(config: Config) -> None:
    """Publish the configuration and load SGLang's plugins; ours must be among them."""
    config.publish()
    from sglang.srt.plugins import load_plugins as load

    from sgl_det import launch_hook
    from sgl_det.patches import seed_rules

    seed_rules.SETTINGS.default = config.default_seed
    launch_hook.drain_for(config.drain_s)
    load()
    if plugin.active() is None:
        # Another component loaded SGLang's plugins before this process was ours.
        plugin.activate(Config(owner=os.getpid()))


def decide(server_args: Any, config: Config) -> tuple[Backend, Judgement]:
    """Judge SGLang's resolved arguments. Raises Refused with a sentence per line."""
    name = server_args.attention_backend
    backend = BACKENDS.get(name)
    if backend is None:
        raise Refused(
            f"attention backend {name!r} is not one of {', '.join(BACKENDS)}; "
            f"choose one of them with --attention-backend"
        )
    try:
        model_config = server_args.get_model_config()
    except Exception as error:
        raise Refused(_first_line(f"model {server_args.model_path}", error)) from error
    judgement = judge(server_args, model_config, backend, os.environ, frozenset(config.allow))
    if judgement.refusals:
        raise Refused("\n".join(r.sentence for r in judgement.refusals))
    config.with_backend(backend.name).publish()
    return backend, judgement


def expect_key(config: Config, key: str) -> None:
    """Refuse to serve under another numerics key than the one the user named."""
    if config.expect_key is not None and config.expect_key != key:
        raise Refused(
            f"the numerics key of this server is {key}, expected {config.expect_key}; compare "
            f"GET /determinism of both servers to see which part differs"
        )


def claims(backend: Backend, judgement: Judgement) -> tuple[list[str], dict[str, str]]:
    """Claimed axes, and every other axis with its reason, after what the user lifted."""
    missing = {**backend.not_claimed, **judgement.dropped}
    claimed = [a.value for a in backend.claims if a not in judgement.dropped]
    return sorted(claimed), {a.value: reason for a, reason in sorted(missing.items())}


def tell_lifted(judgement: Judgement) -> None:
    """An event for each refusal that the user lifted, with the axes that it costs."""
    from sgl_det import events

    for name in judgement.lifted:
        lost = [a.value for a, why in judgement.dropped.items() if why.startswith(f"{name} was")]
        events.tell("lifted", name=name, not_claimed=lost)


def determinism(report: dict[str, Any], backend: Backend, judgement: Judgement) -> dict[str, Any]:
    """The answer to GET /determinism: the worker's report and the launcher's judgement."""
    claimed, missing = claims(backend, judgement)
    if report["problem"]:
        missing |= dict.fromkeys(claimed, report["problem"])
        claimed = []
    return {
        **{k: v for k, v in report.items() if k != "problem"},
        "backend": backend.name,
        "claims": claimed,
        "not_claimed": missing,
        "lifted": list(judgement.lifted),
        "problem": report["problem"],
    }


def masked(argv: list[str]) -> str:
    """A command line for the log, with the values of secrets replaced."""
    import shlex

    shown, hide = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        secret = flag.lstrip("-").replace("-", "_") in _SECRETS
        shown.append("***" if hide else f"{flag}=***" if secret and equals else word)
        hide = secret and not equals and word.startswith("--")
    return shlex.join(shown)


def summary(backend: Backend, judgement: Judgement) -> str:
    """A few lines on what was patched, claimed and lifted."""
    claimed, missing = claims(backend, judgement)
    count = len(plugin.active().patches)
    worker = len(plugin.patches_of_worker(backend))
    lines = [
        f"patched: {count} places in this process, {worker} in the scheduler ({backend.name})",
        f"claimed: {', '.join(claimed) or 'nothing'}",
        f"not claimed: {', '.join(missing) or 'nothing'}",
    ]
    if judgement.lifted:
        lines.append(f"refusals lifted by --det-allow: {', '.join(judgement.lifted)}")
    return "\n".join(f"sgl_det: {line}" for line in lines)


def _first_line(what: str, error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{what} cannot be used: {first}"
