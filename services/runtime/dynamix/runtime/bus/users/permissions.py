"""What a user of the broker may publish and listen to, by role, job and node; generated from the table of kinds.

- A message is published on its own subject. Every answer, acknowledgement and delivery comes to the sender's inbox, to
  which no other user can listen.
- To read a stream takes its state (STREAM.INFO), a consumer (CONSUMER.CREATE) and requests for messages (MSG.NEXT). The
  consumer's filter is part of the request's subject, and the server checks that both agree: with
  `CONSUMER.CREATE.FEED.*.dynamix.v1.report.*.*` one can read reports and nothing else of FEED.
- JetStream sends an answer to whatever subject the request names for it, with its own rights: to a subject of a stream,
  where it is stored, or to one of its API, where it is carried out. Trainers of certain jobs are kept from that by
  accounts of their own (`crossings`); all other users can do it, and are to be trusted with the broker.
- Durable consumers (collector, reward) are also looked up, reset and acknowledged; acknowledgements come in two forms,
  without and with domain and account. Unnamed ones are deleted after use.
- A trainer has no consumer: what it receives is heard as it is published (actions: as they are stored), and the newest
  message of a subject is asked for on a subject of its own (DIRECT.GET), so that both can be limited to its jobs.
- Learned policies are files in an object store: chunks on `$O.<bucket>.C.*`, descriptions on `$O.<bucket>.M.*`. The
  user who writes them may also remove chunks (PURGE); replacing a description allows that anyway.
- `nats micro ls` asks on $SRV.PING, INFO and STATS, each for all services, for those of a name, and for one. Only the
  watcher may ask; a service answers to the watcher's inbox. There is no allow_responses: it would let a service publish
  on any reply subject that a request names.
- A wildcard is a whole token, and the name of a consumer is one: a user whose consumers have no fixed name could make,
  change, drain or delete another user's consumer of a stream that it reads, and so stop the services. Names are fixed
  for a collector of certain nodes and a reward service of certain instances; these are denied to all others.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dynamix.runtime.bus.broker.requests import API
from dynamix.runtime.bus.discovery import PREFIX, VERBS
from dynamix.schemas import subjects
from dynamix.schemas.kinds import BY_NAME, KINDS, SERVICES, WATCHER, Kind
from dynamix.schemas.streams import ACTIONS, DEAD, FEED, JOBS, POLICIES, Stream
from dynamix.schemas.subjects import ANY

PROVISION = "provision"
ROLES = (*SERVICES, PROVISION, WATCHER)
INBOX = "_INBOX"

_DURABLE = ("collector", "reward")
_LOOKS_UP = {"arbitrator": (JOBS, FEED, ACTIONS), "learner": (JOBS, FEED, ACTIONS)}
_READS_WHOLE = {"learner": FEED}
"""By one consumer with several filters, which permissions cannot limit."""

_Places = Mapping[str, Sequence[str]]
"""What may stand in a subject for a token; any where it is missing."""


class Permissions(NamedTuple):
    """Subjects, with the broker's wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions_of(
    role: str, name: str, *, jobs: Sequence[str] = (), nodes: Sequence[str] = (), instances: Sequence[str] = ()
) -> Permissions:
    """What a user of a role needs, and no more.

    Args:
        role: one of `ROLES`.
        name: of the user.
        jobs: of a trainer; none: all.
        nodes: of a collector; none: all.
        instances: of a reward service; none: all.
    """
    inbox = f"{INBOX}.{inbox_of(role, name)}.>"
    if role == PROVISION:  # it forgets families of jobs, too
        return Permissions((f"{API}>", _any("profile")), (inbox,))
    if role == WATCHER:
        return Permissions(tuple(_watched()), (inbox, _any("live")))
    places: dict[str, Sequence[str]] = {"service": (role,)}
    if jobs:
        places["job"] = jobs
    if nodes:
        places |= {"node": nodes, "instance": nodes}
    if instances:
        places["instance"] = instances
    publish = [*_sent(role, places), *_read(role, places)]
    subscribe = [inbox, *_heard(role, places)]
    if role != "trainer":
        publish.append(f"{INBOX}.{WATCHER}.>")
        subscribe += _asked(role)
    return Permissions(tuple(publish), tuple(subscribe))


def crossings(trainers: Permissions) -> Iterator[tuple[str, str]]:
    """What passes between an account of a trainer and that of the streams: `service` or `stream`, and the subject.

    Answers come back to the trainer's own account, wherever it wants them. Heartbeats only leave it.
    """
    yield from (("service", subject) for subject in trainers.publish)
    live = subjects.of("live", "trainer", ANY)
    yield from (
        ("stream", subject) for subject in trainers.subscribe if not subject.startswith(INBOX) and subject != live
    )


def fixed_consumers(role: str, *, nodes: Sequence[str] = (), instances: Sequence[str] = ()) -> list[str]:
    """The names of a user's consumers where it may use no others: of a collector's nodes, a reward service's instances.

    They are durable, and what is done to them decides whether its service reads anything.
    """
    return [f"{role}-{place}" for place in {"collector": nodes, "reward": instances}.get(role, ())]


def denied(role: str, others: Sequence[str]) -> Iterator[str]:
    """What a user whose consumers may have any name must not publish: requests that name one of `others`.

    Args:
        role: of the user. An operator's may do anything; a trainer has no consumer.
        others: consumers with fixed names. Those of its own role are its own, as when a shared password is given up.
    """
    if role in ("trainer", PROVISION):
        return
    for name in others:
        if not name.startswith(f"{role}-"):
            yield from (f"{API}CONSUMER.*.*.{name}", f"{API}CONSUMER.*.*.{name}.>", f"{API}CONSUMER.MSG.NEXT.*.{name}")


def inbox_of(role: str, name: str) -> str:
    """What follows `_INBOX` in a user's inbox; a watcher's is where services may answer its questions."""
    return f"{WATCHER}.{name}" if role == WATCHER != name else name


def _sent(role: str, places: _Places) -> Iterator[str]:
    for kind in KINDS:
        if role in kind.senders:
            yield from _subjects(kind, places)
    if role == "learner":
        yield from (f"$O.{POLICIES.bucket}.C.*", f"$O.{POLICIES.bucket}.M.*")


def _read(role: str, places: _Places) -> Iterator[str]:
    """Requests to JetStream's API."""
    if role == "trainer":
        for name in ("job", "action"):
            for subject in _subjects(BY_NAME[name], places):
                yield f"{API}DIRECT.GET.{BY_NAME[name].carrier}.{subject}"
        return
    whole = _READS_WHOLE.get(role)
    filters: dict[str, list[str]] = {} if whole is None else {whole.name: []}
    for kind in KINDS:
        if role in kind.receivers and kind.stream is not None and kind.stream is not whole:
            filters.setdefault(kind.stream.name, []).extend(_subjects(kind, places))
    for stream, wanted in filters.items():
        names = fixed_consumers(role, nodes=places.get("node", ()), instances=places.get("instance", ())) or [ANY]
        yield from _durable(stream, wanted, names) if role in _DURABLE else _unnamed(stream, wanted)
    if role == "arbitrator":  # for alerts, it counts all users' requests, and what each stream takes
        yield from (f"{API}INFO", f"{API}STREAM.INFO.{DEAD.name}")
    for looked_up in _LOOKS_UP.get(role, ()):
        yield from (f"{API}STREAM.{what}.{looked_up.name}" for what in ("MSG.GET", "INFO"))
    if role in ("arbitrator", "learner"):
        yield from _objects(POLICIES, removes=role == "learner")


def _durable(stream: str, wanted: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    yield f"{API}STREAM.INFO.{stream}"
    for name in names:
        yield from (f"{API}CONSUMER.CREATE.{stream}.{name}.{subject}" for subject in wanted)
        yield from (f"{API}CONSUMER.{what}.{stream}.{name}" for what in ("MSG.NEXT", "INFO", "RESET"))
        yield from (f"$JS.ACK.{stream}.{name}.>", f"$JS.ACK.*.*.{stream}.{name}.>")


def _unnamed(stream: str, wanted: Sequence[str]) -> Iterator[str]:
    yield f"{API}STREAM.INFO.{stream}"
    yield from (f"{API}CONSUMER.CREATE.{stream}.*.{subject}" for subject in wanted)
    if not wanted:
        yield f"{API}CONSUMER.CREATE.{stream}.>"
    yield from (f"{API}CONSUMER.{what}.{stream}.*" for what in ("MSG.NEXT", "DELETE"))


def _objects(stream: Stream, *, removes: bool) -> Iterator[str]:
    yield from _unnamed(stream.name, [f"$O.{stream.bucket}.>"])
    yield f"{API}STREAM.MSG.GET.{stream.name}"
    if removes:
        yield f"{API}STREAM.PURGE.{stream.name}"


def _watched() -> Iterator[str]:
    yield from (f"{API}INFO", f"{API}STREAM.INFO.*", f"{API}STREAM.MSG.GET.*", f"{API}CONSUMER.CREATE.*.>")
    yield from (f"{API}CONSUMER.{what}.*.*" for what in ("MSG.NEXT", "DELETE"))
    yield f"{PREFIX}.>"


def _heard(role: str, places: _Places) -> Iterator[str]:
    """Without a stream: its own heartbeat, for health checks; and what a trainer hears of its jobs."""
    yield from _subjects(BY_NAME["live"], places)
    for kind in KINDS:
        if role == "trainer" and role in kind.receivers and kind.stream is not None:
            wanted = _subjects(kind, places)
            yield from map(subjects.announced, wanted) if kind.stream.announces else wanted


def _asked(role: str) -> Iterator[str]:
    """Requests of `nats micro`, to all services, and to this one by name or id."""
    for verb in VERBS:
        yield from (f"{PREFIX}.{verb}", f"{PREFIX}.{verb}.dynamix-{role}", f"{PREFIX}.{verb}.dynamix-{role}.*")


def _subjects(kind: Kind, places: _Places) -> Iterator[str]:
    for tokens in itertools.product(*(places.get(token, (ANY,)) for token in kind.tokens)):
        yield subjects.of(kind.name, *tokens)


def _any(kind: str) -> str:
    return subjects.template(BY_NAME[kind], ANY)
