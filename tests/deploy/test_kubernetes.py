"""The manifest of the collector with eBPF: three capabilities, the processes and groups of the host, and no more."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamix.schemas.subjects import check_token

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = "dynamix-collector-ebpf"


def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes/collector.yaml").read_text())
    return loaded


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifest()["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    found: dict[str, Any] = only
    return found


def test_it_is_one_daemon_set_that_selects_its_own_pods() -> None:
    assert (manifest()["apiVersion"], manifest()["kind"]) == ("apps/v1", "DaemonSet")
    assert manifest()["spec"]["selector"]["matchLabels"] == manifest()["spec"]["template"]["metadata"]["labels"]


def test_its_root_has_three_capabilities_and_can_neither_write_nor_gain_any() -> None:
    assert container()["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["BPF", "NET_ADMIN", "PERFMON"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_of_the_host_it_sees_processes_and_control_groups_only() -> None:
    assert pod()["hostPID"] is True
    assert "hostNetwork" not in pod()
    assert "hostIPC" not in pod()
    assert pod()["automountServiceAccountToken"] is False
    paths = [volume["hostPath"]["path"] for volume in pod()["volumes"] if "hostPath" in volume]
    assert paths == ["/sys/fs/cgroup"]


def test_every_mount_is_of_a_volume_and_read_only() -> None:
    mounts = {mount["name"]: mount for mount in container()["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod()["volumes"]}
    assert all(mount["readOnly"] for mount in mounts.values())
    password = next(one["value"] for one in container()["env"] if one["name"] == "DYNAMIX_NATS_PASSWORD_FILE")
    assert Path(password).parent == Path(mounts["password"]["mountPath"])


def test_its_image_is_a_target_of_the_dockerfile() -> None:
    assert container()["image"].partition(":")[0] == IMAGE
    assert f" AS {IMAGE.removeprefix('dynamix-')}\n" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize("node", ["ip-10-0-0-7.eu-west-1.compute.internal", "node-a"])
def test_the_service_makes_a_valid_name_of_the_nodes(tmp_path: Path, node: str) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\nprintf %s "$DYNAMIX_NODE"\n')
    (tmp_path / "python").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_NAME": node}
    shown = subprocess.run(container()["command"], env=environ, capture_output=True, text=True, check=True).stdout
    assert check_token(shown) == node.split(".", maxsplit=1)[0]


def test_probes_and_scrapes_ask_the_port_that_the_service_answers_on() -> None:
    environ = {variable["name"]: variable.get("value") for variable in container()["env"]}
    (port,) = container()["ports"]
    assert environ["DYNAMIX_METRICS_PORT"] == str(port["containerPort"])
    assert environ["DYNAMIX_METRICS_HOST"] == "0.0.0.0"
    probes = {what: container()[what]["httpGet"] for what in ("livenessProbe", "readinessProbe")}
    assert {what: probe["path"] for what, probe in probes.items()} == {
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    annotations = manifest()["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": environ["DYNAMIX_METRICS_PORT"],
        "prometheus.io/path": "/metrics",
    }
