"""The compose file: valid, with no right that a service does not need. test_containers.py runs it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = json.loads((Path(__file__).parent / "compose.schema.json").read_text())
FILES = ("compose.yaml", "compose.ebpf.yaml")
SERVICES = ("collector", "reward", "arbitrator", "learner")


def compose(file: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / file).read_text())


ALL = compose()["services"]


@pytest.mark.parametrize("file", FILES)
def test_the_file_follows_the_schema(file: str) -> None:
    jsonschema.validate(compose(file), SCHEMA)


@pytest.mark.parametrize("name", ALL)
def test_a_container_is_closed_and_has_what_it_names(name: str) -> None:
    spec, whole = ALL[name], compose()
    assert (spec["read_only"], spec["cap_drop"]) == (True, ["ALL"])
    assert spec["security_opt"] == ["no-new-privileges:true"]
    assert ("healthcheck" in spec) == (spec.get("restart") == "always"), "what stays up is watched"
    assert ("mem_limit" in spec) == (name not in {"keys", "top"})
    if build := spec.get("build"):
        assert f" AS {build['target']}\n" in (DEPLOY / build["context"] / build["dockerfile"]).read_text()
        assert spec["image"].startswith(f"dynamix-{build['target']}:")
    for secret in spec.get("secrets", ()):
        assert (secret if isinstance(secret, str) else secret["source"]) in whole["secrets"]
    if name in {*SERVICES, "provision"}:
        assert spec["secrets"] == ["ca", {"source": name, "target": "key"}]
        assert whole["secrets"][name]["file"] == f"secrets/credentials/{name}.creds"


def test_only_the_collector_sees_processes_of_the_host_and_only_the_keys_command_sees_the_authority() -> None:
    assert [name for name, spec in ALL.items() if spec.get("pid") == "host"] == ["collector"]
    assert [name for name, spec in ALL.items() if "./secrets:/etc/dynamix" in spec.get("volumes", ())] == ["keys"]
    assert [name for name, spec in ALL.items() if "user" in spec] == ["keys"], "the authority is root's"
    assert [name for name, spec in ALL.items() if "cap_add" in spec] == []
    ebpf = compose("compose.ebpf.yaml")["services"]
    assert list(ebpf) == ["collector"]
    assert ebpf["collector"]["cap_add"] == ["BPF", "NET_ADMIN", "PERFMON"]
    assert ebpf["collector"]["volumes"] == ["/sys/fs/cgroup:/sys/fs/cgroup:ro"]


def test_prometheus_scrapes_every_service_that_always_runs_and_no_port_but_the_brokers_is_open_to_others() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/compose.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["job_name"] == "dynamix", "the alerts expect it"
    assert scrape["static_configs"] == [{"targets": [f"{name}:9601" for name in SERVICES if name != "learner"]}]
    ports = {name: spec["ports"] for name, spec in ALL.items() if "ports" in spec}
    assert ports == {"nats": ["4222:4222"], "prometheus": ["127.0.0.1:9090:9090"]}
