"""Types of the fields of messages, with the limits that a decoder enforces."""

from typing import Annotated

from msgspec import Meta

MAX_RANKS = 1 << 17
"""Most ranks of one job: bounds the memory for a foreign message."""

MAX_GENERATION = 1_000_000
"""Most starts of one job; a higher number is forged, and would leave no room for the next start."""

MAX_SOCKETS = 4096
"""Sockets that one rank names; a full mesh of as many ranks is far beyond what such back ends are used for."""

MAX_CARRY_BYTES = 256 * 1024
"""A policy's whole memory between two windows (architecture: one action per window)."""

TOKEN_PATTERN = r"^[a-z0-9-]{1,63}\Z"  # noqa: S105 - a subject token, not a secret

Token = Annotated[str, Meta(pattern=TOKEN_PATTERN)]
"""One token of a subject: a job, a node, a service, a policy."""

OptionalToken = Annotated[str, Meta(pattern=r"^[a-z0-9-]{0,63}\Z")]
"""A token, or nothing."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""A count that a float64 holds exactly."""

Cookie = Annotated[int, Meta(ge=1)]
"""A socket's number in the kernel, never given twice while it runs."""

Seconds = Annotated[float, Meta(ge=0)]
Digest = Annotated[bytes, Meta(max_length=32)]
Carry = Annotated[bytes, Meta(max_length=MAX_CARRY_BYTES)]
Text = Annotated[str, Meta(max_length=1024)]
