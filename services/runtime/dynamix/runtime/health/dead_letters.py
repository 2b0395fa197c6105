"""Messages that could not be used: counted, logged, and kept with the reason on `dead.<kind>.<job>`, rate-limited."""

import hashlib
import logging

from dynamix.runtime.bus import BusError, BusMessage, ServiceBus
from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas import codec, subjects
from dynamix.schemas.kinds import BY_NAME
from dynamix.schemas.messages import Dead

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 4096
MAX_TEXT = 1024
PER_KIND_PER_S = 10.0
UNKNOWN = "unknown"


class DeadLetters:
    """Sets aside the messages that one service cannot use.

    Args:
        bus: where it is published.
        service: the service that could not use them.
        counters: gets `dead_letters`, and `dead_letters_not_kept` for those over the rate or refused by the bus.
    """

    def __init__(self, bus: ServiceBus, service: str, counters: dict[str, int]) -> None:
        self._bus = bus
        self._service = service
        self._counters = counters
        self._limit = RateLimit(PER_KIND_PER_S, burst=int(PER_KIND_PER_S))

    async def set_aside(self, message: BusMessage, reason: str) -> None:
        """Set a message aside; never raises."""
        self._count("dead_letters")
        self._bus.statistics.of_subjects(message.subject).num_errors += 1
        kind, job = tokens_of(message.subject)
        if not self._limit.allow(kind):
            self._count("dead_letters_not_kept")
            return
        dead = Dead(
            service=self._service,
            subject=message.subject[:MAX_TEXT],
            sequence=message.sequence,
            reason=reason[:MAX_TEXT],
            payload=message.payload[:MAX_PAYLOAD_BYTES],
        )
        digest = hashlib.sha256(message.payload).hexdigest()[:16]
        identity = f"dead:{self._service}:{dead.subject}:{message.sequence}:{digest}"
        logger.warning(
            "dead letter: %s",
            reason,
            extra={
                "subject": dead.subject,
                "sequence": message.sequence,
                "job": job,
                "suppressed": self._limit.suppressed(kind),
            },
        )
        try:
            await self._bus.publish_bytes_soon(subjects.of("dead", kind, job), codec.encode(dead), identity)
        except (BusError, ValueError) as error:
            self._count("dead_letters_not_kept")
            logger.warning("a dead letter was not kept: %s", error)

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1


def tokens_of(subject: str) -> tuple[str, str]:
    """Kind and job in a subject that may be foreign; `unknown` for what is not ours or cannot be a token."""
    tokens = subject.removeprefix(subjects.ROOT + ".").split(".")
    kind = tokens[0] if subject.startswith(subjects.ROOT + ".") and tokens[0] in BY_NAME else UNKNOWN
    try:
        return kind, subjects.parse(subject).tokens[0]
    except ValueError:
        return kind, UNKNOWN
