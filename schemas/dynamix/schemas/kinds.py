"""One row per kind of message: its Struct, who sends it to whom, what carries it. Docs and codec read this table."""

from typing import NamedTuple

from . import messages, subjects
from .streams import STREAMS


class Kind(NamedTuple):
    """A kind of message."""

    name: str
    code: int
    """The kind's byte in the codec's header; never reused."""
    struct: type[messages.Message]
    tokens: tuple[str, ...]
    """The fields of the message that stand in its subject, in order."""
    sender: str
    receivers: str
    meaning: str

    @property
    def subject(self) -> str:
        """Template of the subject, for example `dynamix.v1.action.<job>`."""
        return ".".join((subjects.ROOT, self.name, *(f"<{token}>" for token in self.tokens)))

    @property
    def carrier(self) -> str:
        """Name of the stream that keeps it, or `core NATS`."""
        return next((stream.name for stream in STREAMS if self.name in stream.kinds), "core NATS")


KINDS = (
    Kind("job", 1, messages.Job, ("job",), "trainer, rank 0", "all services", "specification, start, end of a job"),
    Kind(
        "report", 2, messages.Report, ("job", "node"), "trainer, local rank 0", "collector", "what the ranks measured"
    ),
    Kind(
        "window",
        3,
        messages.MetricWindow,
        ("job", "node"),
        "collector",
        "reward, watchers",
        "the report plus what the kernel saw",
    ),
    Kind("state", 4, messages.State, ("job", "node"), "collector", "arbitrator", "state vectors of a node's ranks"),
    Kind("reward", 5, messages.Reward, ("job", "node"), "reward", "learner, watchers", "rewards, every term apart"),
    Kind("action", 6, messages.Action, ("job",), "arbitrator", "trainer, rank 0", "the one decision for a window"),
    Kind(
        "applied",
        7,
        messages.Applied,
        ("job",),
        "trainer, rank 0",
        "learner, audit",
        "an action that all ranks adopted",
    ),
    Kind(
        "policy",
        8,
        messages.PolicyVersion,
        ("policy",),
        "learner",
        "watchers, learners",
        "a version of a policy exists",
    ),
    Kind("dead", 9, messages.Dead, ("kind", "job"), "any service", "operators", "a message nobody could use, and why"),
    Kind("live", 10, messages.Live, ("service", "instance"), "any service", "operators", "heartbeat and counters"),
    Kind(
        "event", 11, messages.Event, ("job",), "arbitrator, learner", "watchers, operators", "a failure signature seen"
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}
BY_STRUCT = {kind.struct: kind for kind in KINDS}


def subject_of(message: messages.Message) -> str:
    """Subject of a message, from its own fields (`dead` takes its tokens apart from the message)."""
    kind = BY_STRUCT[type(message)]
    return ".".join(
        (subjects.ROOT, kind.name, *(subjects.check_token(getattr(message, token)) for token in kind.tokens))
    )


def markdown() -> str:
    """The tables of docs/subjects.md."""
    lines = ["| subject | message | from | to | carried by | what it is |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{kind.subject}` | `{kind.struct.__name__}` | {kind.sender} | {kind.receivers} "
        f"| {kind.carrier} | {kind.meaning} |"
        for kind in KINDS
    ]
    lines += [
        "",
        "| stream | keeps | for | at most | per subject | duplicates dropped within |",
        "|---|---|---|---|---|---|",
    ]
    for stream in STREAMS:
        age = f"{stream.max_age_s / 86400:g} days" if stream.max_age_s else "ever"
        count = str(stream.max_messages_per_subject) if stream.max_messages_per_subject > 0 else "no limit"
        kept = ", ".join(stream.kinds) or f"objects: {stream.bucket}"
        lines.append(
            f"| {stream.name} | {kept} | {age} | {stream.max_bytes >> 20} MiB | {count} "
            f"| {stream.duplicate_window_s:g} s |"
        )
    return "\n".join(lines) + "\n"
