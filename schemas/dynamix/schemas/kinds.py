"""The kinds of message: the one table of their subjects, streams, senders and readers.

Subjects, the streams' contents, codec and docs/subjects.md are derived from it; tests/deploy holds the
broker's permissions against it.
"""

from typing import NamedTuple

from . import messages
from .streams import ACTIONS, DEAD, FEED, JOBS, POLICIES, PROFILES, REPORTS, Stream

SERVICES = ("trainer", "collector", "reward", "arbitrator", "learner")
WATCHER = "watcher"
"""Stands for `dynamix top`, `doctor`, `capture` and other tools: it may read every kind."""


class Kind(NamedTuple):
    """A kind of message."""

    name: str
    """Follows the root in its subjects."""
    code: int
    """The kind's byte in the codec's header; never reused."""
    struct: type[messages.Message]
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
    """Which rank of a job sends or receives it, where the trainer does."""

    @property
    def has_one_sender(self) -> bool:
        """Whether no two users send the same message; false for services that replace each other."""
        return self.senders in {("trainer",), ("collector",)}

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
         ("reward",), ("trainer", "learner"), "rewards, every term apart", "rank 0, for its metrics"),
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
