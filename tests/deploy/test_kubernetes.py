"""The Kubernetes manifests: valid, no right that a pod does not need, probes and policies that fit the services."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from tests.support.manifests import KUBERNETES, Manifest, base, documents, find, pods, resources, training

from dynamix.schemas.subjects import check_token

ROOT = Path(__file__).parents[2]
SERVICES = ("collector", "reward", "arbitrator")
OLDEST = "1.31"
VERSIONS = (OLDEST, kubernetes_validate.latest_version())
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


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", [*base(), *training()], ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_follows_the_schema_of_its_kind(manifest: Manifest, version: str) -> None:
    check(manifest, version)


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


@pytest.mark.parametrize(
    ("kind", "name", "old", "new"),
    [
        ("Deployment", "dynamix-reward", "readOnlyRootFilesystem", "readOnlyRootFileSystem"),
        ("Deployment", "dynamix-reward", "replicas: 1", "replicas: one"),
        ("NetworkPolicy", "dynamix-nats", "podSelector", "podSelectors"),
        ("TrainJob", "mnist", "numNodes", "numNode"),
        ("TrainJob", "mnist", "numProcPerNode: 4", "numProcPerNode: four"),
        ("TrainingRuntime", "dynamix", "replicatedJobs", "replicatedJob"),
        ("TrainingRuntime", "dynamix", "enableServiceLinks", "enableServiceLink"),
    ],
)
def test_a_mistake_in_a_manifest_would_be_found(kind: str, name: str, old: str, new: str) -> None:
    text = yaml.safe_dump(find([*base(), *training()], kind, name))
    assert old in text
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError, ValueError)):
        check(yaml.safe_load(text.replace(old, new)))


def test_every_file_of_the_base_is_a_resource_of_it() -> None:
    files = {f"base/{path.name}" for path in (KUBERNETES / "base").glob("*.yaml")} - {"base/kustomization.yaml"}
    assert sorted(resources("base")) == sorted(files)
    (ebpf,) = documents("ebpf/kustomization.yaml")
    assert (ebpf["resources"], ebpf["patches"]) == (["../base"], [{"path": "collector.yaml"}])


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


def test_ebpf_gives_root_three_capabilities_and_the_nodes_control_groups_and_nothing_else() -> None:
    (patch,) = documents("ebpf/collector.yaml")
    pod = patch["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    (container,) = pod["containers"]
    assert container["securityContext"] == {"capabilities": {"drop": ["ALL"], "add": ["BPF", "NET_ADMIN", "PERFMON"]}}
    assert container["volumeMounts"] == [{"name": "cgroup", "mountPath": "/sys/fs/cgroup", "readOnly": True}]


def test_there_are_these_pods() -> None:
    assert set(PODS) == {
        "DaemonSet dynamix-collector",
        "Deployment dynamix-reward",
        "Deployment dynamix-arbitrator",
        "Job dynamix-provision",
        "Job mnist",
        "TrainingRuntime dynamix",
    }


@pytest.mark.parametrize("what", PODS)
def test_no_pod_is_root_or_can_write_or_gain_rights(what: str) -> None:
    assert PODS[what]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert only_container(PODS[what])["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("what", PODS)
def test_no_pod_speaks_to_the_api_server_or_gets_variables_that_are_settings_of_ours(what: str) -> None:
    """A service named dynamix-nats would be DYNAMIX_NATS_PORT in every pod of its namespace: an unknown setting."""
    assert PODS[what]["spec"]["automountServiceAccountToken"] is False
    assert PODS[what]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("what", PODS)
def test_only_collectors_see_processes_of_the_host(what: str) -> None:
    spec = PODS[what]["spec"]
    assert spec.get("hostPID", False) is (what == "DaemonSet dynamix-collector")
    assert not {"hostNetwork", "hostIPC"} & set(spec)
    assert [volume for volume in spec["volumes"] if "hostPath" in volume] == []


@pytest.mark.parametrize("what", PODS)
def test_a_pod_has_its_own_key_and_speaks_tls(what: str) -> None:
    container, spec = only_container(PODS[what]), PODS[what]["spec"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    (secret,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "key"]
    (kustomization,) = documents("base/kustomization.yaml")
    made = {one["name"]: one["files"] for one in kustomization["secretGenerator"]}
    name = what.partition(" ")[2]
    environ = {one["name"]: one.get("value") for one in container["env"]}
    if name in {"mnist", "dynamix"}:
        assert secret == {"secretName": "dynamix-trainer", "defaultMode": 0o440}
        assert environ["DYNAMIX_NATS_URL"].startswith("tls://")
        assert Path(environ["DYNAMIX_NATS_CA_FILE"]).parent == Path(mounts["key"]["mountPath"])
    else:
        assert container["envFrom"] == [{"configMapRef": {"name": "dynamix-environment"}}]
        collectors = name == "dynamix-collector"
        assert secret == {"secretName": f"{name}{'s' if collectors else ''}", "defaultMode": 0o440}
        assert collectors or made[name] == [f"key.creds=secrets/credentials/{name.removeprefix('dynamix-')}.creds"]
        (variables,) = kustomization["configMapGenerator"]
        assert "DYNAMIX_NATS_URL=tls://dynamix-nats.dynamix:4222" in variables["literals"]
        assert f"DYNAMIX_NATS_CA_FILE={mounts['ca']['mountPath']}/ca.crt" in variables["literals"]
    if name != "dynamix-collector":
        assert environ["DYNAMIX_NATS_CREDS_FILE"] == f"{mounts['key']['mountPath']}/key.creds"


@pytest.mark.parametrize("what", sorted(set(PODS) - {"TrainingRuntime dynamix"}))
def test_every_pod_has_a_limit_of_memory(what: str) -> None:
    assert "memory" in only_container(PODS[what])["resources"]["limits"]


@pytest.mark.parametrize("service", SERVICES)
def test_probes_and_scrapes_ask_the_port_that_a_service_answers_on(service: str) -> None:
    pod, container = service_pod(service), only_container(service_pod(service))
    environ = {one["name"]: one.get("value") for one in container["env"]}
    (port,) = container["ports"]
    assert environ["DYNAMIX_METRICS_PORT"] == str(port["containerPort"]) == "9601"
    assert environ["DYNAMIX_METRICS_HOST"] == "0.0.0.0"
    probes = {what: container[what]["httpGet"] for what in ("livenessProbe", "readinessProbe")}
    assert {what: probe["path"] for what, probe in probes.items()} == {
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert pod["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": environ["DYNAMIX_METRICS_PORT"],
        "prometheus.io/path": "/metrics",
    }


@pytest.mark.parametrize("what", PODS)
def test_an_image_is_a_target_of_the_dockerfile_in_the_version_of_this_project(what: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    target, _, tag = only_container(PODS[what])["image"].removeprefix("dynamix-").partition(":")
    assert f" AS {target}\n" in (ROOT / "deploy/Dockerfile").read_text()
    assert tag == version


@pytest.mark.parametrize("kind", ["DaemonSet", "Deployment", "PodDisruptionBudget"])
def test_what_selects_pods_selects_its_own(kind: str) -> None:
    for one in (one for one in base() if one["kind"] == kind):
        name = one["metadata"]["name"].removeprefix("dynamix-")
        assert one["spec"]["selector"]["matchLabels"] == service_pod(name)["metadata"]["labels"]


def test_one_arbitrator_stays_when_nodes_are_drained_and_the_reward_service_is_never_there_twice() -> None:
    manifests = base()
    assert find(manifests, "Deployment", "dynamix-arbitrator")["spec"]["replicas"] == 2
    assert find(manifests, "PodDisruptionBudget", "dynamix-arbitrator")["spec"]["minAvailable"] == 1
    reward = find(manifests, "Deployment", "dynamix-reward")["spec"]
    assert (reward["replicas"], reward["strategy"]) == (1, {"type": "Recreate"})
    assert {"name": "DYNAMIX_INSTANCE", "value": "1"} in only_container(reward["template"])["env"]


def test_only_the_broker_is_spoken_to_and_only_by_those_who_may() -> None:
    def ports(name: str, direction: str) -> list[int]:
        return [
            port["port"] for rule in find(base(), "NetworkPolicy", name)["spec"][direction] for port in rule["ports"]
        ]

    assert ports("dynamix-services", "ingress") == [9601]
    assert ports("dynamix-services", "egress") == [4222, 53, 53]
    assert ports("dynamix-nats", "ingress") == [4222, 6222]
    assert ports("dynamix-nats", "egress") == [6222, 53, 53]
    selected = find(base(), "NetworkPolicy", "dynamix-services")["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected <= service_pod(name)["metadata"]["labels"].items() for name in SERVICES)
    clients = find(base(), "NetworkPolicy", "dynamix-nats")["spec"]["ingress"][0]["from"][1]
    assert clients["namespaceSelector"]["matchLabels"] == {"dynamix/clients": "yes"}
    for what in ("Job mnist", "TrainingRuntime dynamix"):
        assert clients["podSelector"]["matchLabels"].items() <= PODS[what]["metadata"]["labels"].items()


@pytest.mark.parametrize("what", ["DaemonSet dynamix-collector", "Job mnist", "TrainJob mnist"])
@pytest.mark.parametrize("node", ["ip-10-0-0-7.eu-west-1.compute.internal", "node-a"])
def test_collector_and_ranks_make_the_same_valid_name_of_the_nodes(tmp_path: Path, what: str, node: str) -> None:
    shown = start(what, tmp_path, 'printf %s "$DYNAMIX_NODE"', NODE_NAME=node)
    assert check_token(shown) == node.split(".", maxsplit=1)[0]


@pytest.mark.parametrize("what", ["Job mnist", "TrainJob mnist"])
def test_the_jobs_id_is_its_name_and_eight_digits_of_the_uid(tmp_path: Path, what: str) -> None:
    shown = start(what, tmp_path, 'printf %s "$DYNAMIX_JOB"')
    assert check_token(shown) == "mnist-0b3ad2c4"


def test_all_pods_of_the_torchrun_job_meet_at_the_first_one(tmp_path: Path) -> None:
    words = [start("Job mnist", tmp_path, 'printf "%s\n" "$@"', JOB_COMPLETION_INDEX=index).split() for index in "01"]
    options = [dict(zip(one[2:-1:2], one[3::2], strict=False)) for one in words]
    assert [one["--rdzv-conf"].split(",")[0] for one in options] == ["is_host=1", "is_host=0"]
    spec = find(training(), "Job", "mnist")["spec"]
    host, _, port = options[0]["--rdzv-endpoint"].partition(":")
    assert host == f"mnist-0.{spec['template']['spec']['subdomain']}"
    service = find(training(), "Service", "mnist")["spec"]
    assert (service["clusterIP"], [str(one["port"]) for one in service["ports"]]) == ("None", [port])
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert options[0]["--nnodes"] == str(spec["completions"]) == str(spec["parallelism"])


def start(what: str, directory: Path, body: str, **environ: str) -> str:
    """Run a container's command where `python` and `dynamix` are a script with this body."""
    if what.startswith("TrainJob"):
        command: list[Any] = find(training(), "TrainJob", "mnist")["spec"]["trainer"]["command"]
    else:
        command = only_container(PODS[what])["command"]
    for program in ("python", "dynamix"):
        (directory / program).write_text(f"#!/bin/sh\n{body}\n")
        (directory / program).chmod(0o755)
    known = {
        "PATH": f"{directory}:/usr/bin:/bin",
        "NODE_NAME": "node-a",
        "JOB_UID": "0b3ad2c4-7d8e-4f6a-9a51-2c1f0e9d8b7a",
        "JOB_COMPLETION_INDEX": "0",
    }
    return subprocess.run(command, env={**known, **environ}, capture_output=True, text=True, check=True).stdout
