"""What runs aegis elsewhere, as far as it can be checked without a container: files, settings and probes agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from aegis.config.sources import load

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "configs" / "container"
DOCKERFILE = CONTAINER / "Dockerfile"
MANIFESTS = ROOT / "configs" / "kubernetes" / "aegis.yaml"
UNIT = ROOT / "configs" / "systemd" / "aegis.service"
PROBES = {"/health", "/ready"}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((CONTAINER / "compose.yaml").read_text()))


def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFESTS.read_text())}


def test_the_dockerfile_passes_its_linter() -> None:
    found = subprocess.run([Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    copied = [
        name
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == let_in and all((ROOT / name).exists() for name in copied)


def test_what_is_compiled_is_in_every_image() -> None:
    """The C of decode steps is left out where there is no compiler, without an error."""
    for stage in ("cpu", "cuda"):
        _, _, text = DOCKERFILE.read_text().partition(f" AS {stage}\n")
        text = text.partition("\nFROM ")[0]
        assert "COPY --from=compiled" in text or "gcc" in text.partition("pip install")[0], stage


def test_threads_are_dealt_to_instances_in_every_place() -> None:
    """With OMP_NUM_THREADS each would have so many, however many cores there are."""
    for place in (DOCKERFILE, CONTAINER / "compose.yaml", MANIFESTS, UNIT):
        assert "OMP_NUM_THREADS" not in place.read_text(), place


def test_gpus_are_given_to_the_image_that_is_made_for_them() -> None:
    service = yaml.safe_load((CONTAINER / "compose.gpu.yaml").read_text())["services"]["aegis"]
    assert f" AS {service['build']['target']}\n" in DOCKERFILE.read_text()
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_the_variables_of_the_compose_file_are_settings() -> None:
    services = compose()["services"]
    variables = {
        name: re.sub(r"\$\{\w+:[-?][^}]*\}", "", str(value)) for name, value in services["aegis"]["environment"].items()
    }
    config = load({}, variables)
    assert config.server.host == "0.0.0.0"
    assert config.redis.url and config.redis.url.get_secret_value() == "redis://redis:6379"
    assert config.mqtt.url and config.mqtt.url.get_secret_value() == "mqtt://mosquitto:1883"
    assert {"redis", "mosquitto"} <= set(services)


def test_files_that_the_compose_file_mounts_are_there() -> None:
    mounted = [volume.split(":")[0] for each in compose()["services"].values() for volume in each.get("volumes", [])]
    assert [name for name in mounted if name.startswith(".") and not (CONTAINER / name).exists()] == []
    (target,) = yaml.safe_load((CONTAINER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert target["targets"] == ["aegis:8000"]


def test_ports_of_the_compose_file_are_open_to_this_machine_alone() -> None:
    ports = [port for each in compose()["services"].values() for port in each.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_manifests_are_valid() -> None:
    for each in manifests().values():
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_probes_ask_what_answers_and_settings_of_the_manifests_can_be_read(tmp_path: Path) -> None:
    found = manifests()
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: each["httpGet"]["path"] for name, each in container.items() if name.endswith("Probe")}
    assert set(probes.values()) == PROBES and len(probes) == 3
    file = tmp_path / "aegis.yaml"
    file.write_text(found["ConfigMap"]["data"]["aegis.yaml"])
    config = load({"config": file}, {})
    assert config.server.shutdown_timeout_s < pod["terminationGracePeriodSeconds"]
    assert config.instances.count == int(container["resources"]["limits"]["nvidia.com/gpu"])
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def test_the_unit_calls_commands_that_there_are() -> None:
    calls = re.findall(r"^ExecStart(?:Pre)?=\S+/aegis (\w+)", UNIT.read_text(), re.MULTILINE)
    assert calls == ["config", "launch"]
