"""Subjects: the only place that spells them and checks their tokens.

A job stands in a subject as two tokens, its name and its run, so that a key for a name covers all its runs: job
`mnist-0a1b2c3d` is `mnist.0a1b2c3d`. The run is what follows the last dash; `_` stands for none (job `mnist`).
"""

import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from .kinds import BY_STRUCT, KINDS, Kind
from .messages import Message
from .messages.fields import TOKEN_PATTERN
from .streams import Stream

ROOT = "dynamix.v1"
ANNOUNCED = f"{ROOT}.stored"
ANY = "*"
"""Stands for every job or node in a filter."""

RUN_ID_BYTES = 4
MAX_NAME = 63 - 1 - 2 * RUN_ID_BYTES
"""Characters of a job's name: its id is the name, a dash and a run id, in one token."""

NO_RUN = "_"
"""Replaces the run of a job id without a dash; no token of ours has this character."""

_TOKEN = re.compile(TOKEN_PATTERN)
_RUN = re.compile(r"[a-z0-9]+\Z")
_TOKENS = {kind.name: kind.tokens for kind in KINDS}


class Address(NamedTuple):
    """The parts of a subject: its kind and its tokens, for example `("state", ("mnist-1a2b3c4d", "node-a"))`."""

    kind: str
    tokens: tuple[str, ...]


def is_token(value: str) -> bool:
    """Whether a text can be a token of a subject: 1 to 63 of the characters a-z, 0-9 and -."""
    return _TOKEN.match(value) is not None


@lru_cache(maxsize=4096)  # the same few jobs and nodes come with every message
def check_token(value: str) -> str:
    """Return `value` when it can be a token of a subject.

    Raises:
        ValueError: when it has other characters than a-z, 0-9 and -, or not 1 to 63 of them.
    """
    if not is_token(value):
        raise ValueError(f"{value!r} cannot be part of a subject: use 1 to 63 of the characters a-z, 0-9 and '-'")
    return value


def new_run_id() -> str:
    """Make a run's id, 8 hexadecimal digits that tell runs of one name apart."""
    return secrets.token_hex(RUN_ID_BYTES)


def of(kind: str, *tokens: str) -> str:
    """Subject of a kind of message, from its tokens: `of("report", job, node)`; a filter where one is `ANY`.

    Raises:
        ValueError: for a token that cannot stand in a subject.
    """
    pairs = zip(_TOKENS[kind], tokens, strict=True)
    parts = [
        ".".join(name_and_run(token)) if name == "job" else token if token == ANY else check_token(token)
        for name, token in pairs
    ]
    return ".".join((ROOT, kind, *parts))


def name_and_run(job: str) -> tuple[str, str]:
    """The two tokens of a job. Raises ValueError for what cannot stand in a subject."""
    if job == ANY:
        return ANY, ANY
    name, _, run = check_token(job).rpartition("-")
    return (name, run) if name and run else (job, NO_RUN)


def announced(subject: str) -> str:
    """Subject on which a stream that announces publishes a message again once it is stored."""
    assert subject.startswith(ROOT), f"{subject} is no subject of ours"
    return ANNOUNCED + subject.removeprefix(ROOT)


def covers(wide: str, narrow: str) -> bool:
    """Whether a filter matches all that another filter, or a subject, matches."""
    one, other = wide.split("."), narrow.split(".")
    if one[-1] == ">" and len(other) >= len(one):
        one, other = one[:-1], other[: len(one) - 1]
    return len(one) == len(other) and all(a in (ANY, b) for a, b in zip(one, other, strict=True))


def subject_of(message: Message) -> str:
    """Subject of a message, from its own fields; not of a dead letter, whose tokens describe what it holds."""
    kind = BY_STRUCT[type(message)]
    return of(kind.name, *(getattr(message, token) for token in kind.tokens))


def all_of(kind: str) -> str:
    """Filter for every subject of a kind."""
    return f"{ROOT}.{kind}.>"


def kept_by(stream: Stream) -> list[str]:
    """Filters for all messages that a stream keeps."""
    return [all_of(kind.name) for kind in KINDS if kind.carrier == stream.name]


def token_names(kind: Kind) -> list[str]:
    """The tokens of a kind's subjects: the fields of its message, with `name` and `run` for its job."""
    return [name for field in kind.tokens for name in (("name", "run") if field == "job" else (field,))]


def template(kind: Kind, place: Callable[[str], str]) -> str:
    """Subject of a kind, by what `place` gives for each of its `token_names`."""
    return ".".join((ROOT, kind.name, *map(place, token_names(kind))))


@lru_cache(maxsize=4096)
def parse(subject: str) -> Address:
    """Take a subject apart. Raises ValueError when it is not one of ours, with the reason."""
    prefix = ROOT + "."
    if not subject.startswith(prefix):
        raise ValueError(f"subject {subject!r} does not start with {prefix!r}")
    kind, *parts = subject[len(prefix) :].split(".")
    names = _TOKENS.get(kind, ())
    if len(parts) != len(names) + ("job" in names) or not names:
        raise ValueError(f"subject {subject!r} is of no known kind")
    if "job" in names:
        place = names.index("job")
        name, run = parts[place : place + 2]
        if run != NO_RUN and not _RUN.match(run):  # a dash would make it the job of another name
            raise ValueError(f"subject {subject!r} has {run!r} where a job's run stands: use a-z and 0-9 only")
        parts[place : place + 2] = [name if run == NO_RUN else f"{name}-{run}"]
    for token in parts:
        check_token(token)
    return Address(kind, tuple(parts))
