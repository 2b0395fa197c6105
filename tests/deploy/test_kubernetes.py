"""The Kubernetes manifests: valid, no right that a pod does not need, probes and policies that fit the services."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from tests.support.deployed_broker import DEPLOY
from tests.support.manifests import KUBERNETES, Manifest, base, documents, find, pods, resources, training

from dynamix.runtime.embedded import server_binary
from dynamix.schemas.subjects import check_token

ROOT = Path(__file__).parents[2]
SERVICES = ("collector", "reward", "arbitrator")
OLDEST = "1.31"
MODELS = {"TrainingRuntime": TrainerV1alpha1TrainingRuntime, "TrainJob": TrainerV1alpha1TrainJob}
PODS = dict(pods([*base(), *training()]))

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is MISSING: only our own reading of the kustomizations is checked"
)


def only_container(pod: Manifest) -> Manifest:
    (found,) = pod["spec"]["containers"]
    return found


def service_pod(name: str) -> Manifest:
    kind = "DaemonSet" if name == "collector" else "Deployment"
    return PODS[f"{kind} dynamix-{name}"]


def check(manifest: Manifest, version: str = OLDEST) -> None:
    """Kubernetes's schemas with unknown fields refused; Trainer's kinds by its own models, which leave those out."""
    if model := MODELS.get(manifest["kind"]):
        assert model.from_dict(manifest).to_dict() == manifest
        if manifest["kind"] == "TrainingRuntime":
            (replicated,) = manifest["spec"]["template"]["spec"]["replicatedJobs"]
            template = replicated["template"]["spec"]["template"]
            job = {"template": {**template, "spec": {"restartPolicy": "Never", **template["spec"]}}}
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "n"}, "spec": job}, version)
        return
    kubernetes_validate.validate(manifest, version, strict=True)


@needs_kubectl
@pytest.mark.parametrize("folder", ["base", "ebpf"])
def test_kustomize_builds_what_is_valid_in_one_namespace(folder: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (kustomization,) = documents("base/kustomization.yaml")
    for secret in kustomization["secretGenerator"]:
        for file in secret["files"]:
            path = tmp_path / "kubernetes/base" / file.partition("=")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("secret")
    command = ["kubectl", "kustomize", str(tmp_path / "kubernetes" / folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for manifest in yaml.safe_load_all(shown):
        check(manifest)
        assert manifest["metadata"].get("namespace", "dynamix") == "dynamix"


def test_every_manifest_follows_the_schema_of_its_kind_and_a_mistake_is_found() -> None:
    manifests = [*base(), *training()]
    for manifest in manifests:
        for version in (OLDEST, kubernetes_validate.latest_version()):
            check(manifest, version)
    files = {f"base/{path.name}" for path in (KUBERNETES / "base").glob("*.yaml")} - {"base/kustomization.yaml"}
    assert sorted(resources("base")) == sorted(files)
    text = yaml.safe_dump(find(manifests, "Deployment", "dynamix-reward"))
    with pytest.raises(kubernetes_validate.ValidationError):
        check(yaml.safe_load(text.replace("readOnlyRootFilesystem", "readOnlyRootFileSystem")))


@pytest.mark.parametrize("what", PODS)
def test_a_pod_has_no_right_beyond_its_key_and_a_collectors_view_of_processes(what: str) -> None:
    """Service links would make an unknown setting, DYNAMIX_NATS_PORT, of a service named dynamix-nats."""
    spec, container, name = PODS[what]["spec"], only_container(PODS[what]), what.partition(" ")[2]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert spec.get("hostPID", False) is (what == "DaemonSet dynamix-collector")
    assert not {"hostNetwork", "hostIPC"} & set(spec)
    assert [volume for volume in spec["volumes"] if "hostPath" in volume] == []
    (secret,) = [volume["secret"]["secretName"] for volume in spec["volumes"] if volume["name"] == "key"]
    keys = {"mnist": "dynamix-trainer", "dynamix": "dynamix-trainer", "dynamix-collector": "dynamix-collectors"}
    assert secret == keys.get(name, name)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    target, _, tag = container["image"].removeprefix("dynamix-").partition(":")
    assert f" AS {target}\n" in (ROOT / "deploy/Dockerfile").read_text()
    assert tag == version


@pytest.mark.parametrize("service", SERVICES)
def test_probes_scrapes_and_selectors_fit_the_service(service: str) -> None:
    pod, container = service_pod(service), only_container(service_pod(service))
    environ = {one["name"]: one.get("value") for one in container["env"]}
    (port,) = container["ports"]
    assert environ["DYNAMIX_METRICS_PORT"] == str(port["containerPort"])
    probes = {what: container[what]["httpGet"] for what in ("livenessProbe", "readinessProbe")}
    assert probes == {
        "livenessProbe": {"path": "/livez", "port": port["name"]},
        "readinessProbe": {"path": "/readyz", "port": port["name"]},
    }
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == environ["DYNAMIX_METRICS_PORT"]
    for one in base():
        if one["metadata"]["name"] == f"dynamix-{service}" and "selector" in one.get("spec", {}):
            assert one["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"], one["kind"]


def test_the_collector_makes_a_valid_name_of_its_node_as_ranks_do(tmp_path: Path) -> None:
    """tests/e2e/test_cluster_jobs.py runs the commands of ranks."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf %s "$DYNAMIX_NODE"\n')
    (tmp_path / "python").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_NAME": "ip-10-0-0-7.eu-west-1.compute.internal"}
    command = only_container(service_pod("collector"))["command"]
    named = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert check_token(named) == "ip-10-0-0-7"


# --- the values of the NATS chart ---

CHART_SCHEMA = json.loads((Path(__file__).parent / "nats-values.schema.json").read_text())
(VALUES,) = documents("nats-values.yaml")


def configuration(directory: Path) -> str:
    """What the chart makes of the values (its files/config and templates/_helpers.tpl, in our words)."""
    values = VALUES["config"]
    store = values["jetstream"]["fileStore"]
    whole: dict[str, Any] = {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "pid_file": str(directory / "nats.pid"),
        "port": 4222,
        "http_port": 8222,
        "jetstream": {
            "max_memory_store": 0,
            "store_dir": str(directory / "data"),
            "max_file_store": f"<< {store['maxSize']} >>",
            **values["jetstream"]["merge"],
        },
        **values["merge"],
    }
    tls = values["nats"]["tls"]
    assert tls["enabled"]
    place = "/etc/nats-certs/nats"
    files = {"cert_file": f"{place}/tls.crt", "key_file": f"{place}/tls.key"}
    whole["tls"] = {**files, "ca_file": str(directory / "ca.pem"), **tls["merge"]}
    numbers = range(values["cluster"]["replicas"])
    routes = [f"tls://dynamix-nats-{number}.dynamix-nats-headless:6222" for number in numbers]
    whole["cluster"] = {"name": "dynamix-nats", "port": 6222, "no_advertise": True, "routes": routes}
    assert values["cluster"]["tls"] == {"enabled": True, "secretName": "dynamix-nats-tls"}
    whole["cluster"]["tls"] = {**files, "ca_file": str(directory / "ca.pem")}
    text = json.dumps(whole, indent=2, sort_keys=True)
    text = re.sub(r'".*\$include": "(.*)",?', r"include \1;", text)
    return re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", text)


def test_the_values_follow_the_schema() -> None:
    jsonschema.validate(VALUES, CHART_SCHEMA)


def test_no_server_is_root_or_can_write_beyond_its_streams() -> None:
    pod = VALUES["podTemplate"]["merge"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    closed = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [VALUES[name]["merge"]["securityContext"] for name in ("container", "reloader")] == [closed, closed]


def test_a_real_server_takes_the_configuration_that_the_chart_makes(tmp_path: Path) -> None:
    """The same files, variables and places; only the folders of the pod are below the test's."""
    subprocess.run(
        ["sh", str(DEPLOY / "make-secrets.sh"), str(tmp_path), "dynamix-nats.dynamix", "*.dynamix-nats-headless"],
        env={**os.environ, "DYNAMIX": f"{sys.executable} -m dynamix.cli.main"},
        check=True,
        capture_output=True,
    )
    merged = r"configMap\.merge\.data\.(\w+)\\\.conf=(\S+)'"  # by the command in the values' head
    named = dict(re.findall(merged, (KUBERNETES / "nats-values.yaml").read_text()))
    assert named == {"dynamix": "deploy/nats.conf", "accounts": "deploy/kubernetes/base/secrets/accounts.conf"}
    shutil.copy(DEPLOY / "nats.conf", tmp_path / "dynamix.conf")
    certificates = "/etc/nats-certs/nats"
    text = configuration(tmp_path).replace('"/data', f'"{tmp_path}/data')
    (tmp_path / "chart.conf").write_text(text.replace(certificates, str(tmp_path / "tls")))
    for name, file in (("tls.crt", "certificate.pem"), ("tls.key", "key.pem")):
        (tmp_path / "tls" / file).rename(tmp_path / "tls" / name)
    variables = {
        name: value.replace(certificates, str(tmp_path / "tls"))
        for name, value in VALUES["container"]["env"].items()
        if name.startswith("NATS_")
    }
    environ = {**variables, "SERVER_NAME": "dynamix-nats-0"}
    command = [str(server_binary()), "-t", "-c", str(tmp_path / "chart.conf")]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (told.returncode, "is valid" in told.stderr) == (0, True), told.stderr
