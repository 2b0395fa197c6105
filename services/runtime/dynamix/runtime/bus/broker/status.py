"""The status line that the broker sends in place of a payload."""

from typing import NamedTuple

HEARTBEAT = 100
NOT_FOUND = 404
REQUEST_EXPIRED = 408
CONFLICT = 409
NO_RESPONDERS = 503

_PREFIX = b"NATS/1.0 "


class Status(NamedTuple):
    """A status: its code, its words, and how many messages of an ended request were not delivered."""

    code: int
    text: str
    num_pending: int


def parse_status(headers: bytes) -> Status:
    """The status in raw headers; code 0 when they have none."""
    line, *fields = headers.split(b"\r\n")
    code, _, text = line[len(_PREFIX) :].partition(b" ")
    if not line.startswith(_PREFIX) or not code.isdigit():
        return Status(0, "", 0)
    num_pending = 0
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() == b"nats-pending-messages" and value.strip().isdigit():
            num_pending = int(value)
    return Status(int(code), text.decode(errors="replace").strip(), num_pending)
