"""The Dockerfile: a target per service, none runs as root by default, torch only where it trains."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("collector", "reward", "arbitrator", "learner", "cli", "train")


class Stage(NamedTuple):
    name: str
    parent: str
    instructions: list[str]


def stages() -> dict[str, Stage]:
    """The Dockerfile's stages, comments and continued lines taken out."""
    source = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", source, flags=re.MULTILINE)).splitlines()
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, lines):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            current = found[match[2]] = Stage(match[2], match[1], [])
        elif current is not None:
            current.instructions.append(line)
    return found


def lineage(name: str) -> list[Stage]:
    """A stage and what it is built on, itself first."""
    known = stages()
    chain = [known[name]]
    while chain[-1].parent in known:
        chain.append(known[chain[-1].parent])
    return chain


def sources(name: str) -> set[str]:
    """The stages that a target copies from."""
    return {
        match[1]
        for stage in lineage(name)
        for line in stage.instructions
        if (match := re.match(r"COPY --from=(\S+)", line))
    }


def effective(name: str, keyword: str) -> str:
    """The last instruction of a kind that holds for a target."""
    return next(
        line for stage in lineage(name) for line in reversed(stage.instructions) if line.startswith(keyword + " ")
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_exists_and_runs_without_root(target: str) -> None:
    assert effective(target, "USER") == "USER 10001:10001"


def test_the_image_with_ebpf_is_the_collectors_with_bcc_and_headers_but_no_compiler() -> None:
    """Root, as containers pass capabilities to no other user: what it may do is for who runs it to grant."""
    assert effective("collector-ebpf", "USER") == "USER 0:0"
    assert effective("collector-ebpf", "ENTRYPOINT") == effective("collector", "ENTRYPOINT")
    own = stages()["collector-ebpf"].instructions
    assert "COPY --from=headers /usr/src /usr/src" in own
    assert [line for line in own if "install" in line and "python3-bpfcc" in line and "linux-headers" not in line]


@pytest.mark.parametrize("service", ["collector", "reward", "arbitrator"])
def test_a_service_image_runs_the_module_of_its_name(service: str) -> None:
    assert effective(service, "ENTRYPOINT") == f'ENTRYPOINT ["python", "-m", "dynamix.{service}"]'
    assert (ROOT / "services" / service / "dynamix" / service / "__main__.py").is_file()


def test_the_learners_image_runs_the_learner() -> None:
    assert effective("learner", "ENTRYPOINT") == 'ENTRYPOINT ["python", "-m", "dynamix.arbitrator.learning"]'
    assert (ROOT / "services" / "arbitrator" / "dynamix" / "arbitrator" / "learning" / "__main__.py").is_file()


@pytest.mark.parametrize("target", TARGETS)
def test_only_the_images_that_train_and_learn_bring_torch(target: str) -> None:
    steps = [line for source in sources(target) for stage in lineage(source) for line in stage.instructions]
    assert any("torch" in step for step in steps if step.startswith("RUN")) == (target in {"train", "learner"})


@pytest.mark.parametrize("target", [*TARGETS, "collector-ebpf"])
def test_no_final_image_holds_the_build_tools(target: str) -> None:
    steps = [line for stage in lineage(target) for line in stage.instructions]
    assert [line for line in steps if re.search(r"\b(pip|gcc|linux-headers)", line)] == []


def test_everything_copied_exists_and_is_let_through_by_the_ignore_file() -> None:
    allowed = set((ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split())
    copied = {
        path for line in stages()["build"].instructions if line.startswith("COPY ") for path in line.split()[1:-1]
    }
    assert {path for path in copied if not (ROOT / path).exists() or f"!{path}" not in allowed} == set()


def test_the_python_image_is_pinned_to_the_tested_version() -> None:
    assert "ARG PYTHON_IMAGE=python:3.11-slim-bookworm" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert {stage.parent for stage in stages().values()} <= {"${PYTHON_IMAGE}", *stages()}
