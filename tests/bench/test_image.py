"""A Dockerfile carried out without Docker: what each step leaves in the tree, and how closed its command runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bench.image.container import container_command, container_environment
from bench.image.dockerfile import lineage, read_stages
from bench.image.tree import BuildError, TreeBuilder

SMALL = r"""
ARG BASE=tiny
# two stages
FROM ${BASE} AS build
ENV GREETING=hello PATH=/opt/bin:/usr/bin:/bin
WORKDIR /src
COPY one.txt two.txt ./
COPY folder folder
RUN echo "$GREETING $(cat one.txt)" > /made \
    && cat folder/inner.txt >> /made

FROM ${BASE} AS final
COPY --from=build /made /made
COPY --from=build /src /src
USER 10001:10001
ENTRYPOINT ["sh", "-c", "id -u; cat /made"]
"""

may_mount = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not may_mount,
    reason="not root, or mounts are refused: no Dockerfile is carried out here",
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A system of four programs and what they are linked with."""
    root = tmp_path / "tiny"
    for folder in ("dev", "proc", "run", "tmp", "etc", "bin", "usr/bin"):
        (root / folder).mkdir(parents=True)
    for program in ("sh", "cat", "id", "touch"):
        found = shutil.which(program)
        assert found is not None
        shutil.copy(found, root / "bin" / program)
        linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", linked):
            place = root / library.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)
    return root


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "folder/__pycache__").mkdir(parents=True)
    (root / "folder/__pycache__/inner.pyc").write_text("compiled")
    (root / "folder/inner.txt").write_text("inner\n")
    (root / "one.txt").write_text("one\n")
    (root / "two.txt").write_text("two\n")
    return root


def builder(text: str, context: Path, tiny: Path) -> TreeBuilder:
    work = context.parent / "work"
    work.mkdir()
    return TreeBuilder(read_stages(text), context, tiny, work)


@needs_root
def test_each_instruction_leaves_in_the_tree_what_docker_would(context: Path, tiny: Path) -> None:
    tree = builder(SMALL, context, tiny).build("final")
    assert (tree.root / "made").read_text() == "hello one\ninner\n"
    assert sorted(str(path.relative_to(tree.root)) for path in (tree.root / "src").rglob("*")) == [
        "src/folder",
        "src/folder/inner.txt",
        "src/one.txt",
        "src/two.txt",
    ]
    assert tree.num_bytes - sum(file.stat().st_size for file in tiny.rglob("*") if file.is_file()) == 16 + 6 + 4 + 4
    assert (tree.user, tree.entrypoint[0]) == ("10001:10001", "sh")
    assert "GREETING" not in tree.environ, "variables of another stage stay there"
    assert list((tree.root / "etc").iterdir()) == [], "what the machine lent is gone"


@needs_root
def test_its_command_runs_as_its_user_and_can_write_nothing(context: Path, tiny: Path) -> None:
    tree = builder(SMALL, context, tiny).build("final")
    environ = container_environment(tree, {})
    shown = subprocess.run(container_command(tree), env=environ, capture_output=True, text=True, check=True).stdout
    assert shown == "10001\nhello one\ninner\n"
    (tree.root / "tmp").chmod(0o777)
    refused = subprocess.run(
        container_command(tree, "touch", "/tmp/x"), env=environ, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "Read-only file system" in refused.stderr


@needs_root
def test_a_step_that_fails_is_named_with_what_it_said(context: Path, tiny: Path) -> None:
    with pytest.raises(BuildError, match=r"RUN cat /nothing\n.*No such file"):
        builder("FROM tiny AS one\nRUN cat /nothing\n", context, tiny).build("one")
    shutil.rmtree(context.parent / "work")
    with pytest.raises(BuildError, match=r"COPY none \./: there is no"):
        builder("FROM tiny AS one\nCOPY none ./\n", context, tiny).build("one")


def test_stages_are_read_with_their_continuations() -> None:
    stages = read_stages(SMALL)
    assert [(stage.name, stage.parent) for stage in stages.values()] == [("build", "tiny"), ("final", "tiny")]
    assert [line.keyword for line in stages["build"].instructions] == ["ENV", "WORKDIR", "COPY", "COPY", "RUN"]
    assert stages["build"].instructions[-1].value.endswith("> /made && cat folder/inner.txt >> /made")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("FROM tiny\n", "'FROM tiny': every stage needs a name"),
        ("FROM tiny AS one\nHEALTHCHECK NONE\n", "'HEALTHCHECK NONE': known in a stage are ARG, CMD"),
        ("RUN true\n", "'RUN true': known in a stage are"),
    ],
)
def test_what_is_not_known_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_stages(text)


def test_an_unknown_target_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no target 'fnal': there are build, final"):
        lineage(read_stages(SMALL), "fnal")
