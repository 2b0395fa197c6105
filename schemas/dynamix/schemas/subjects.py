"""The kinds of message, as the one table of their subjects, streams, senders and readers; and the subjects themselves.

Streams' contents, codec and docs/subjects.md are derived from the table; tests/deploy holds the broker's permissions
against it. Subjects are spelled, and their tokens checked, only here.

A job stands in a subject as two tokens, its name and its run, so that a key for a name covers all its runs: job
`mnist-0a1b2c3d` is `mnist.0a1b2c3d`. The run is what follows the last dash; `_` stands for none (job `mnist`).
"""

import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from . import messages
from .messages import Message
from .messages.allocation import TOKEN_PATTERN
from .streams import ACTIONS, DEAD, FEED, JOBS, POLICIES, PROFILES, REPORTS, Stream

# --- kinds

SERVICES = ("trainer", "collector", "reward", "arbitrator", "learner")
WATCHER = "watcher"
"""Stands for `dynamix top`, `doctor`, `capture` and other tools: it may read every kind."""


class Kind(NamedTuple):
    """A kind of message."""

    name: str
    """Follows the root in its subjects."""
    code: int
    """The kind's byte in the codec's header; never reused."""
    struct: type[Message]
    tokens: tuple[str, ...]
    """The fields of the message that stand in its subject, in order."""
    identity: tuple[str, ...]
    """The fields that, after the tokens, tell two messages of this kind apart: see `codec.message_id`."""
    stream: Stream | None
    """The stream that keeps it; `None` for core NATS."""
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    """Services that read it; the watcher may, too."""
    meaning: str
    rank: str = ""
    """The rank of a job that sends or receives it, where the trainer does."""

    @property
    def carrier(self) -> str:
        """Name of the stream that keeps it, or `core NATS`."""
        return "core NATS" if self.stream is None else self.stream.name


_WINDOW = ("generation", "window")

# Two lines for each kind read better than the formatter's twelve.
# fmt: off
KINDS = (
    Kind("job", 1, messages.Job, ("job",), ("generation", "phase"), JOBS,
         ("trainer",), ("arbitrator", "learner"), "specification, start, end of a job", "rank 0"),
    Kind("report", 2, messages.Report, ("job", "node"), _WINDOW, REPORTS,
         ("trainer",), ("collector",), "what the ranks measured", "local rank 0"),
    Kind("window", 3, messages.MetricWindow, ("job", "node"), _WINDOW, FEED,
         ("collector",), ("reward",), "the report plus what the kernel saw"),
    Kind("state", 4, messages.State, ("job", "node"), _WINDOW, FEED,
         ("collector",), ("arbitrator", "learner"), "state vectors of a node's ranks"),
    Kind("reward", 5, messages.Reward, ("job", "node"), _WINDOW, FEED,
         ("reward",), ("learner",), "rewards, every term apart"),
    Kind("action", 6, messages.Action, ("job",), (*_WINDOW, "hash"), ACTIONS,
         ("arbitrator",), ("trainer", "learner"), "the one decision for a window", "rank 0"),
    Kind("applied", 7, messages.Applied, ("job",), ("generation", "decided_window"), FEED,
         ("trainer",), ("arbitrator", "learner"), "an action that all ranks adopted", "rank 0"),
    Kind("trace", 12, messages.Trace, ("job", "node"), _WINDOW, FEED,
         ("collector",), ("trainer",), "what a node's agent leaves for all ranks", "local rank 0"),
    Kind("policy", 8, messages.PolicyVersion, ("policy",), ("version", "digest"), POLICIES,
         ("learner",), ("arbitrator", "learner"), "a version of a learned policy"),
    Kind("dead", 9, messages.Dead, ("kind", "job"), (), DEAD,
         SERVICES, (), "a message that could not be used, and why"),
    Kind("live", 10, messages.Live, ("service", "instance"), (), None,
         SERVICES, (), "heartbeat and counters"),
    Kind("event", 11, messages.Event, ("job",), (*_WINDOW, "signature"), FEED,
         ("arbitrator", "learner"), (), "a failure signature seen"),
    Kind("profile", 13, messages.JobProfile, ("family",), ("run", "job", "generation"), PROFILES,
         ("arbitrator",), ("arbitrator",), "what the runs of a job family learned"),
)
# fmt: on

BY_NAME = {kind.name: kind for kind in KINDS}
BY_STRUCT = {kind.struct: kind for kind in KINDS}

# --- subjects

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
    """Return `value`. Raises ValueError when it is no token of a subject: 1 to 63 of the characters a-z, 0-9 and -."""
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
