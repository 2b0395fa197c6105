"""The JetStream streams, as one table: `dynamix provision` makes them, docs/subjects.md shows them.

Which kinds of message a stream keeps stands in `subjects`.
"""

from typing import Literal

import msgspec

KIB = 1 << 10
MIB = 1 << 20
DAY_S = 24 * 3600
MAX_STORED_BYTES = 520 * KIB
"""The codec's limit and its headers: a client that goes round the codec may not store more either."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream: what it keeps, how long and how much. Retention is always `limits`, so that replay works."""

    name: str
    max_age_s: float
    """0: for ever."""
    max_bytes: int
    """Reserved: a stream with reserved bytes still accepts when the account is full."""
    max_messages_per_subject: int
    """-1: no limit."""
    duplicate_window_s: float = 300.0
    deny_delete: bool = False
    """Refuse to delete or purge single messages: the log of decisions is append-only."""
    max_message_bytes: int = MAX_STORED_BYTES
    """The limit of one message with its headers."""
    discard: Literal["old", "new"] = "old"
    announces: bool = False
    """Send each message once more, to those who listen, when it is stored: see `subjects.announced`."""
    hints: bool = False
    """The same with its headers only: readers then know that there is something to read."""


JOBS = Stream(
    name="JOBS",
    max_age_s=30 * DAY_S,
    max_bytes=64 * MIB,
    max_messages_per_subject=1,
    max_message_bytes=68 * KIB,
    hints=True,
)
"""Rank 0 publishes its specification again when it is missing."""
REPORTS = Stream(name="REPORTS", max_age_s=DAY_S, max_bytes=384 * MIB, max_messages_per_subject=4096)
"""Measurements of trainers, for the collectors of their nodes. A stream of its own, so that a flood of reports does not
delay what services send each other."""
FEED = Stream(
    name="FEED",
    max_age_s=DAY_S,
    max_bytes=640 * MIB,
    max_messages_per_subject=4096,
    hints=True,
)
"""It keeps as many windows of a job and node as ACTIONS has decisions. What is not read yet of one subject is read
before what comes on others later, so that a client that floods its own subject delays other jobs by so many messages:
with 100,000 it was 3 s."""
ACTIONS = Stream(
    name="ACTIONS",
    max_age_s=30 * DAY_S,
    max_bytes=512 * MIB,
    max_messages_per_subject=4096,
    deny_delete=True,
    announces=True,
)
"""Announced, so that a training process needs no consumer, whose name no permission could tell from another job's."""
DEAD = Stream(name="DEAD", max_age_s=7 * DAY_S, max_bytes=16 * MIB, max_messages_per_subject=10_000)
PROFILES = Stream(
    name="PROFILES",
    max_age_s=365 * DAY_S,
    max_bytes=32 * MIB,
    max_messages_per_subject=8,
    max_message_bytes=100 * KIB,
    hints=True,
)
"""A version per run of each family; `dynamix family forget` purges a subject."""
POLICIES = Stream(name="POLICIES", max_age_s=0, max_bytes=256 * MIB, max_messages_per_subject=64, discard="new")
"""The newest versions of each learned policy; full, it takes no more names, so that one learner drops no other's."""

STREAMS = (JOBS, REPORTS, FEED, ACTIONS, DEAD, PROFILES, POLICIES)
