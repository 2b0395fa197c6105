"""The stages of a Dockerfile, with their instructions in order. Pure."""

import re
import shlex
from typing import NamedTuple

KEYWORDS = ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "RUN", "STOPSIGNAL", "USER", "WORKDIR")


class Instruction(NamedTuple):
    """One line, with its continuations joined."""

    keyword: str
    value: str

    @property
    def words(self) -> list[str]:
        """The value split as a shell would."""
        return shlex.split(self.value)


class Stage(NamedTuple):
    """What follows a `FROM PARENT AS NAME`; the parent is a stage or, with its variables filled in, an image."""

    name: str
    parent: str
    instructions: list[Instruction]


def read_stages(text: str) -> dict[str, Stage]:
    """The stages by name.

    Raises:
        ValueError: for an instruction that is not known here, and for a stage without a name.
    """
    joined = re.sub(r"\s*\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        keyword, _, value = line.partition(" ")
        if keyword == "FROM":
            parent, separator, name = value.partition(" AS ")
            if not separator:
                raise ValueError(f"{line!r}: every stage needs a name (FROM ... AS NAME)")
            current = found[name] = Stage(name, _filled(parent, arguments), [])
        elif current is None and keyword == "ARG":
            name, _, default = value.partition("=")
            arguments[name] = default
        elif current is None or keyword not in KEYWORDS:
            raise ValueError(f"{line!r}: known in a stage are {', '.join(KEYWORDS)}")
        else:
            current.instructions.append(Instruction(keyword, value))
    return found


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and what it is built on, the base first. Raises ValueError, naming the stages, for an unknown one."""
    if name not in stages:
        raise ValueError(f"no target {name!r}: there are {', '.join(stages)}")
    chain = [stages[name]]
    while chain[-1].parent in stages:
        chain.append(stages[chain[-1].parent])
    return chain[::-1]


def _filled(text: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], text)
