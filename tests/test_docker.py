"""The deployment files are read, not built: what can be checked without a container engine."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from sgl_det import config

DOCKER = Path(__file__).resolve().parents[1] / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"][
    "sgl-det"
]
DEPLOYMENT, SERVICE = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text(encoding="utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def instructions(name: str) -> list[str]:
    """The arguments of an instruction of the Dockerfile, in order, continued lines joined."""
    text = DOCKERFILE.replace("\\\n", " ")
    return [m.group(1).strip() for m in re.finditer(rf"^{name} (.*)$", text, re.MULTILINE)]


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def seconds(text: str) -> float:
    return float(re.fullmatch(r"(\d+)s", text).group(1))


def test_the_tag_is_the_version_that_was_reviewed():
    constraints = (DOCKER / "constraints.txt").read_text(encoding="utf-8")
    version = re.search(r"^sglang==(.*)$", constraints, re.MULTILINE).group(1)
    assert instructions("ARG")[0] == f"SGLANG_TAG=v{version}"
    assert COMPOSE["build"]["args"]["SGLANG_TAG"] == f"${{SGLANG_TAG:-v{version}}}"
    for image in (COMPOSE["image"], CONTAINER["image"]):
        assert image.endswith(f"sgl-det:{version}")


def test_the_image_checks_itself_and_does_not_run_as_root():
    order = re.findall(
        r"^(USER|RUN sgl-det check|ENTRYPOINT|WORKDIR|HEALTHCHECK)", DOCKERFILE, re.M
    )
    assert order == ["WORKDIR", "USER", "RUN sgl-det check", "HEALTHCHECK", "ENTRYPOINT"]
    uid = int(instructions("ARG")[1].removeprefix("UID="))
    assert uid == POD["securityContext"]["runAsUser"] > 0 and POD["securityContext"]["runAsNonRoot"]


def test_what_is_copied_exists_and_holds_every_package():
    root = DOCKER.parent
    sources = [word for line in instructions("COPY") for word in line.split()[:-1]]
    assert all((root / name).exists() for name in sources)
    packages = re.search(r"package-dir\]\n(.*?)\n\n", (root / "pyproject.toml").read_text(), re.S)
    folders = re.findall(r'= "(\w+)"', packages.group(1))
    assert set(folders) <= set(sources)


def test_flags_exist_and_the_end_has_time():
    for words, grace in (
        (COMPOSE["command"], seconds(COMPOSE["stop_grace_period"])),
        (CONTAINER["args"], POD["terminationGracePeriodSeconds"]),
    ):
        assert {w for w in words if w.startswith("--det-")} <= set(config.flags())
        ours, _ = config.split_argv(words, "test")
        assert ours.drain_s + 20 < grace
    assert re.fullmatch("[0-9a-f]{12}", value(CONTAINER["args"], "--det-expect-key"))


def test_ports_paths_and_labels_agree():
    (port,) = instructions("EXPOSE")
    assert f"PORT={port}" in DOCKERFILE and CONTAINER["ports"][0]["containerPort"] == int(port)
    assert COMPOSE["ports"][0].endswith(f":{port}:{port}")
    (home,) = instructions("VOLUME")
    assert {m["mountPath"] for m in CONTAINER["volumeMounts"]} == {home, "/dev/shm"}
    assert COMPOSE["volumes"] == [f"sgl-det-home:{home}"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert {CONTAINER[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "liveness")} == {
        "/health"
    }
