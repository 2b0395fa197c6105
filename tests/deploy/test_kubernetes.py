"""The Kubernetes manifests: valid, no right that a pod does not need, probes and policies that fit the services."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from tests.support.manifests import KUBERNETES, Manifest, base, documents, find, pods, resources, training

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
