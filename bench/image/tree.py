"""Carries out the stages of a Dockerfile in directories.

As root, on Linux with `unshare` and `chroot`. Each RUN is a process in a mount namespace of its own, in the stage's
directory as its root. The machine lends it its way to packages, read-only: apt's and pip's settings, certificates, name
servers; none of it is left in the tree.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .dockerfile import Instruction, Stage, lineage

CERTIFICATES = "/run/certificates.crt"
LENT = {
    "/etc/resolv.conf": "/etc/resolv.conf",
    "/etc/hosts": "/etc/hosts",
    "/etc/apt": "/etc/apt",
    "/etc/pip.conf": "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt": CERTIFICATES,
}
"""What RUN sees of the machine, and where."""
LENT_VARIABLES = ("PIP_", "http_proxy", "https_proxy", "no_proxy")
COPY = ("cp", "--archive", "--reflink=auto")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BuildError(RuntimeError):
    """A step of the Dockerfile failed; the text names it and has its output."""


class ImageTree(NamedTuple):
    """What an image would be: its files, and how it starts."""

    root: Path
    environ: dict[str, str]
    user: str
    directory: str
    entrypoint: list[str]

    @property
    def num_bytes(self) -> int:
        """Size of all files, each once, however many names it has."""
        seen: dict[tuple[int, int], int] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                status = Path(folder, name).lstat()
                seen[status.st_dev, status.st_ino] = status.st_size
        return sum(seen.values())


class TreeBuilder:
    """Builds targets of a Dockerfile, each stage once.

    Args:
        stages: the Dockerfile's.
        context: the directory that COPY takes from.
        base: the tree of the image that the first stages are built on.
        work: where the stages' directories are made.
        lent: directories of the machine that RUN may read, beside `LENT`: pip's archives, for example.
    """

    def __init__(
        self, stages: dict[str, Stage], context: Path, base: Path, work: Path, lent: Sequence[str] = ()
    ) -> None:
        self._stages = stages
        self._context = context
        self._base = base
        self._work = work
        places = {**LENT, **{path: path for path in lent}}
        self._lent = {path: place for path, place in places.items() if Path(path).exists()}
        self._built: dict[str, ImageTree] = {}

    def build(self, target: str) -> ImageTree:
        """The tree of a target, and of all stages that it needs. Raises BuildError for a step that fails."""
        for stage in lineage(self._stages, target):
            if stage.name not in self._built:
                self._built[stage.name] = self._build_stage(stage)
        return self._built[target]

    def _build_stage(self, stage: Stage) -> ImageTree:
        root = self._work / stage.name
        parent = self._built.get(stage.parent) or ImageTree(self._base, {"PATH": PATH}, "0:0", "/", [])
        subprocess.run([*COPY, f"{parent.root}/.", root], check=True)
        tree = parent._replace(root=root, environ=dict(parent.environ))
        for instruction in stage.instructions:
            tree = self._carry_out(tree, instruction)
        return tree

    def _carry_out(self, tree: ImageTree, instruction: Instruction) -> ImageTree:
        match instruction.keyword:
            case "RUN":
                self._run(tree, instruction.value)
            case "COPY":
                self._copy(tree, instruction.words)
            case "ENV":
                tree.environ.update(dict(word.split("=", 1) for word in instruction.words))
            case "ARG":
                name, _, default = instruction.value.partition("=")
                tree.environ.setdefault(name, default)
            case "USER":
                return tree._replace(user=instruction.value)
            case "WORKDIR":
                inside(tree.root, instruction.value).mkdir(parents=True, exist_ok=True)
                return tree._replace(directory=instruction.value)
            case "ENTRYPOINT":
                return tree._replace(entrypoint=json.loads(instruction.value))
        return tree  # CMD and STOPSIGNAL are for what starts it

    def _run(self, tree: ImageTree, command: str) -> None:
        mounts = [f"mount --rbind /dev '{tree.root}/dev'", f"mount -t proc proc '{tree.root}/proc'"]
        made = []
        for path, place in self._lent.items():
            target = inside(tree.root, place)
            if not target.exists():
                made.append(target)
                if Path(path).is_dir():
                    target.mkdir(parents=True)
                else:
                    target.touch()
            mounts += [f"mount --bind '{path}' '{target}'", f"mount -o remount,bind,ro '{target}'"]
        script = " && ".join(
            [*mounts, f"cd '{tree.root}'", f'exec /usr/sbin/chroot . sh -ec "cd {tree.directory} && $1"']
        )
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", command],
            env={**_lent_environment(), **tree.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"RUN {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        for target in made:
            target.rmdir() if target.is_dir() else target.unlink()

    def _copy(self, tree: ImageTree, words: list[str]) -> None:
        *sources, target = words
        origin = self._context
        if sources[0].startswith("--from="):
            origin = self.build(sources.pop(0).removeprefix("--from=")).root
        place = inside(tree.root, os.path.join(tree.directory, target))  # noqa: PTH118 - `..` is not resolved, `/` begins
        for source in (inside(origin, name) for name in sources):
            if not source.exists():
                raise BuildError(f"COPY {' '.join(words)}: there is no {source}")
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                subprocess.run([*COPY, "--no-preserve=ownership", f"{source}/.", place], check=True)
                if origin == self._context:  # as Dockerfile.dockerignore leaves it out
                    _remove_compiled(place)
            else:
                is_folder = target.endswith("/") or len(sources) > 1
                (place if is_folder else place.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)


def _lent_environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(LENT_VARIABLES)}
    if Path("/etc/ssl/certs/ca-certificates.crt").exists():
        found |= {"PIP_CERT": CERTIFICATES, "SSL_CERT_FILE": CERTIFICATES}
    return found


def _remove_compiled(directory: Path) -> None:
    for folder in list(directory.rglob("__pycache__")):
        shutil.rmtree(folder)


def inside(root: Path, path: str) -> Path:
    """Where a path of the image is."""
    return root / path.lstrip("/")
