"""A client that tries what it likes on the bus, round our own checks, and learns what the broker refused."""

import itertools
from collections.abc import Iterable, Iterator

from dynamix.runtime.bus import Bus, PermissionDeniedError
from dynamix.runtime.bus.broker.login import API
from dynamix.schemas.kinds import KINDS, Kind
from dynamix.schemas.subjects import ROOT

STREAMS = ("JOBS", "FEED", "ACTIONS", "DEAD", "PROFILES", "OBJ_policies")
STREAM_OPERATIONS = ("CREATE", "UPDATE", "DELETE", "PURGE", "INFO", "SNAPSHOT", "RESTORE", "MSG.DELETE", "MSG.GET")
CONSUMER_OPERATIONS = ("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT", "PAUSE", "RESET", "UNPIN")


async def refused(bus: Bus, *subjects: str, payload: bytes = b"{}") -> list[bool]:
    """For each subject whether the broker refuses to take a message on it."""
    found = []
    for subject in subjects:
        before = bus.counters["permission_denials"]
        assert await bus._connection.send(subject, payload, f"{bus._connection.inbox}.x")
        await bus._connection.round_trip(30.0)  # a denial comes before the answer
        found.append(bus.counters["permission_denials"] > before)
    return found


async def send_answers_to(bus: Bus, subject: str, content: bytes, own: str) -> None:
    """Let JetStream answer on a subject: with what it stored of a job of our own, and with acknowledgements."""
    asked = f"{API}DIRECT.GET.JOBS.{ROOT}.job.{own}"
    await answered_to(bus, f"{bus._connection.inbox}.x", (f"{ROOT}.job.{own}", content))
    await answered_to(bus, subject, (asked, b""), (f"{ROOT}.job.{own}", content), (f"{ROOT}.applied.{own}", b"junk"))


async def answered_to(bus: Bus, subject: str, *requests: tuple[str, bytes]) -> None:
    """Make requests whose answers shall go to a subject."""
    for request, payload in requests:
        assert await bus._connection.send(request, payload, subject)
        await bus._connection.round_trip(30.0)


async def is_heard(bus: Bus, subject: str) -> bool:
    """Whether the broker lets it listen."""
    before = bus.counters["permission_denials"]
    try:
        async with bus.subscribe(subject):
            await bus._connection.round_trip(30.0)
    except PermissionDeniedError:
        return False
    return bus.counters["permission_denials"] == before


def subjects_of_kind(kind: Kind, places: dict[str, Iterable[str]]) -> Iterator[str]:
    """All subjects of a kind with these tokens; `x` where none is given."""
    for tokens in itertools.product(*(places.get(token, ("x",)) for token in kind.tokens)):
        yield ".".join((ROOT, kind.name, *tokens))


def api_operations(api: str = API) -> list[str]:
    """Requests to JetStream and to the server that read or change more than one's own; JetStream's by a prefix."""
    return [operation.replace(API, api) for operation in _operations()]


def _operations() -> list[str]:
    subjects = [subject for kind in KINDS for subject in subjects_of_kind(kind, {})]
    return [
        *(f"$JS.API.STREAM.{operation}.{stream}" for operation in STREAM_OPERATIONS for stream in STREAMS),
        *(f"$JS.API.CONSUMER.{operation}.{stream}.any" for operation in CONSUMER_OPERATIONS for stream in STREAMS),
        *(f"$JS.API.CONSUMER.CREATE.{stream}.any.{subject}" for stream in STREAMS for subject in subjects),
        *(f"$JS.API.DIRECT.GET.{stream}" for stream in STREAMS),
        *(f"$JS.API.DIRECT.GET.{stream}.{subject}" for stream in STREAMS for subject in subjects),
        *("$JS.API.INFO", "$JS.API.STREAM.LIST", "$JS.API.STREAM.NAMES", "$JS.API.META.LEADER.STEPDOWN"),
        *("$JS.API.ACCOUNT.PURGE.DYNAMIX", "$JS.API.SERVER.REMOVE", "$SYS.REQ.SERVER.PING", "$SYS.REQ.USER.INFO"),
        *("$JS.ACK.FEED.any.1.1.1.1.1", "$JS.ACK._.x.FEED.any.1.1.1.1.1", "$JS.FC.FEED.any.1"),
        *("$O.policies.C.x", "$O.policies.M.x", "$KV.any.x", "$SRV.PING", "$SRV.STATS", "_INBOX.watcher.x"),
        *("_INBOX.arbitrator.x", "_INBOX.reward.x", "dynamix.v1.stored.action.x", "dynamix.v2.action.x", "other"),
    ]
