"""nats-py's client with a shorter way in: each message goes straight to its handler.

nats-py parses the headers of every message, builds an object for it, puts that in a queue and wakes a task that awaits
a callback: more than half of the cost of receiving a message. Nobody here reads headers beyond the status line, and no
handler waits. The price is one overridden private method; `check_nats_py` sees that it is still what we override.
"""

import inspect
import logging
from collections.abc import Callable

import nats
import nats.aio.client

from .errors import BusError

logger = logging.getLogger(__name__)

Handler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Takes subject, reply subject, payload and raw headers of a message; must not block."""

_PARAMETERS = ["self", "sid", "subject", "reply", "data", "headers"]


class Client(nats.aio.client.Client):
    """Delivers to `handlers`, by subscription number.

    A handler that raises is logged: an exception that reached nats-py would end its read loop in silence.
    """

    def __init__(self) -> None:
        check_nats_py()
        super().__init__()
        self.handlers: dict[int, Handler] = {}

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        handler = self.handlers.get(sid)
        if handler is None:
            return
        try:
            handler(subject, reply, data, headers)
        except Exception:
            logger.exception("error while handling a message on %s", subject.decode(errors="replace"))


def check_nats_py() -> None:
    """See that nats-py still hands messages over where we take them.

    Raises:
        BusError: when it does not; naming its version.
    """
    method = getattr(nats.aio.client.Client, "_process_msg", None)
    if method is None or list(inspect.signature(method).parameters) != _PARAMETERS:
        raise BusError(
            f"nats-py {nats.aio.client.__version__} hands messages over in another way than 2.16: install nats-py 2.16"
        )
