"""The Kubernetes manifests, read; and what all of their pods have in common."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
Manifest = dict[str, Any]


def documents(*names: str) -> list[Manifest]:
    """All documents of these files."""
    return [one for name in names for one in yaml.safe_load_all((KUBERNETES / name).read_text())]


def resources(folder: str) -> list[str]:
    """The files that a kustomization names."""
    (kustomization,) = documents(f"{folder}/kustomization.yaml")
    return [f"{folder}/{name}" for name in kustomization["resources"]]


def base() -> list[Manifest]:
    """All that the base is made of, without what kustomize adds."""
    return documents(*resources("base"))


def training() -> list[Manifest]:
    return documents("training/torchrun-job.yaml", "training/trainjob.yaml")


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """The pod templates, with the kind and name of what they are in."""
    for one in manifests:
        spec = one.get("spec", {})
        if one["kind"] == "TrainingRuntime":
            spec = spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        if one["kind"] not in {"NetworkPolicy", "PodDisruptionBudget"} and "template" in spec:
            yield f"{one['kind']} {one['metadata']['name']}", spec["template"]
