"""Messages for operators and tools: policy versions, failure signatures, dead letters, heartbeats."""

from typing import Annotated, Literal

from msgspec import Meta, field

from .fields import Count, Digest, Message, Seconds, Text, Token


class PolicyVersion(Message, frozen=True, kw_only=True, array_like=True):
    """One version of a learned policy."""

    policy: Token
    version: Count
    digest: Digest
    """SHA-256 of `content`."""
    content: bytes
    """The policy file."""


Signature = Literal[
    "size-stuck", "reward-collapse", "reward-plateau", "spread-between-runs", "value-unexplained", "log-refused"
]
"""Known failures of batch-size control (method section 3), and a log of actions that is not trustworthy."""


class Event(Message, frozen=True, kw_only=True, array_like=True):
    """A failure signature, seen in a job's decisions or in the learning of a policy."""

    job: Token
    """The job, or the policy that learns."""
    generation: Count
    window: Count
    """The window, or the episode of learning, in which it was seen."""
    signature: Signature
    service: Token
    """The service that reports it."""
    value: float
    """The number that crossed the limit."""
    limit: float
    explanation: Text


class Dead(Message, frozen=True, kw_only=True, array_like=True):
    """A message that a service could not use: where it came from, why, and its first 4 KB."""

    service: Token
    subject: Text
    sequence: Count
    reason: Text
    payload: Annotated[bytes, Meta(max_length=4096)]


class Live(Message, frozen=True, kw_only=True, array_like=True):
    """A service's heartbeat: it runs and is connected, and what it has counted."""

    service: Token
    instance: Token
    uptime_s: Seconds
    counters: dict[str, Count] = field(default_factory=dict)
    node: Annotated[str, Meta(max_length=63)] = ""
