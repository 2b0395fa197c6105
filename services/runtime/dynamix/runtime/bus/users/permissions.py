"""What a user of the broker may publish and listen to, by role, job and node; generated from the table of kinds.

- A message is published on its own subject. Every answer, acknowledgement and delivery comes to the sender's inbox, to
  which no other user can listen.
- To read a stream takes its state (STREAM.INFO), a consumer (CONSUMER.CREATE) and requests for messages (MSG.NEXT). The
  consumer's filter is part of the request's subject, and the server checks that both agree: with
  `CONSUMER.CREATE.FEED.*.dynamix.v1.report.*.*` one can read reports and nothing else of FEED.
- JetStream sends an answer to whatever subject the request names for it, with its own rights: to a subject of a stream,
  where it is stored, or to one of its API, where it is carried out. Keys are kept from that by accounts without
  streams (`outside`, `requests`): answers stay in them. Users with a password are not, nor is `provision`.
- Durable consumers (collector, reward) are also looked up, reset and acknowledged; acknowledgements come in two forms,
  the second with a domain (`_`: none) and an account. A wildcard for the domain would let in acknowledgements of the
  first form for any consumer. Unnamed ones are deleted after use.
- A trainer has no consumer: what it receives is heard as it is published (actions: as they are stored), and the newest
  message of a subject is asked for on a subject of its own (DIRECT.GET), so that both can be limited to its jobs.
- Learned policies are files in an object store: chunks on `$O.<bucket>.C.*`, descriptions on `$O.<bucket>.M.*`. The
  user who writes them may also remove chunks (PURGE); replacing a description allows that anyway.
- `nats micro ls` asks on $SRV.PING, INFO and STATS, each for all services, for those of a name, and for one. Only the
  watcher may ask; a service answers to the watcher's inbox. There is no allow_responses: it would let a service publish
  on any reply subject that a request names.
- Who knows the name of a consumer can do harm to it: a wildcard is a whole token, and the name is one; and a consumer
  of one's own can be told to deliver to a request of the API that names another. So names of durable consumers, of
  users with keys, end with 64 random bits, and those of unnamed ones with 32; no user is told another's.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dynamix.runtime.bus.broker.login import API, OUTSIDE_API
from dynamix.runtime.bus.discovery import PREFIX, VERBS
from dynamix.schemas import subjects
from dynamix.schemas.kinds import BY_NAME, KINDS, SERVICES, WATCHER, Kind
from dynamix.schemas.streams import ACTIONS, DEAD, FEED, JOBS, POLICIES, PROFILES, Stream
from dynamix.schemas.subjects import ANY

PROVISION = "provision"
ROLES = (*SERVICES, PROVISION, WATCHER)
INBOX = "_INBOX"
_WATCHERS_INBOX = f"{INBOX}.{WATCHER}.>"

DURABLE = ("collector", "reward")
"""Roles that read by consumers which stay."""
_LOOKS_UP = {"arbitrator": (JOBS, FEED, ACTIONS, PROFILES), "learner": (JOBS, FEED, ACTIONS)}
_READS_WHOLE = {"learner": FEED}
"""By one consumer with several filters, which permissions cannot limit."""

_Places = Mapping[str, Sequence[str]]
"""What may stand in a subject for a token; any where it is missing."""


class Permissions(NamedTuple):
    """Subjects, with the broker's wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions_of(
    role: str,
    name: str,
    *,
    jobs: Sequence[str] = (),
    nodes: Sequence[str] = (),
    instances: Sequence[str] = (),
    consumer: str = "",
) -> Permissions:
    """What a user of a role needs, and no more.

    Args:
        role: one of `ROLES`.
        name: of the user.
        jobs: of a trainer; none: all.
        nodes: of a collector; none: all.
        instances: of a reward service; none: all.
        consumer: what the names of its durable consumers end with.
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
    names = [f"{name}-{consumer}" if consumer else name for name in fixed_consumers(role, nodes, instances)]
    publish = [*_sent(role, places), *_read(role, places, names or [ANY])]
    subscribe = [inbox, *_heard(role, places)]
    if role != "trainer":
        publish.append(_WATCHERS_INBOX)
        subscribe += _asked(role)
    return Permissions(tuple(dict.fromkeys(publish)), tuple(dict.fromkeys(subscribe)))


class Request(NamedTuple):
    """A subject that an account without streams sends on to that of the streams; answers come back, and stay in it."""

    subject: str
    local: str
    """In the account without streams."""

    @property
    def has_many_answers(self) -> bool:
        """Whether one request has a stream of answers."""
        return self.subject.startswith(f"{API}CONSUMER.MSG.NEXT.")


def api_of(role: str) -> str:
    """Prefix of a role's requests to JetStream outside the streams' account; a trainer's need no other there."""
    return API if role == "trainer" else OUTSIDE_API


def outside(role: str, permissions: Permissions) -> Permissions:
    """The same in an account without streams."""
    publish = (_with_prefix(subject, api_of(role)) for subject in permissions.publish)
    return Permissions(tuple(publish), permissions.subscribe)


def requests(role: str, permissions: Permissions) -> Iterator[Request]:
    """All that a role publishes, and what follows from it, but for questions to services."""
    for subject in permissions.publish:
        if not subject.startswith(PREFIX):
            yield Request(subject, _with_prefix(subject, api_of(role)))


def said_by(role: str) -> Iterator[str]:
    """What users of other roles hear of a role as it is published.

    What comes to the streams' account by a request is not passed on from there: accounts take it from each other.
    """
    if role == WATCHER:
        yield f"{PREFIX}.>"
        return
    yield subjects.of("live", role, ANY)
    for kind in KINDS:
        if role in kind.senders and "trainer" in kind.receivers and kind.stream and not kind.stream.announces:
            yield from _subjects(kind, {})
    if role != "trainer":
        yield _WATCHERS_INBOX


def heard_by(role: str, permissions: Permissions) -> Iterator[str]:
    """What a role hears of others as it is published, its own inbox left out."""
    for subject in permissions.subscribe:
        if subject not in permissions.publish and (role == WATCHER or not subject.startswith(INBOX)):
            yield subject


def common(heard: str, said: str) -> str | None:
    """The narrower one of two filters of which one covers the other, `None` where none does."""
    return said if subjects.covers(heard, said) else heard if subjects.covers(said, heard) else None


def _with_prefix(subject: str, api: str) -> str:
    return api + subject.removeprefix(API) if subject.startswith(API) else subject


def fixed_consumers(role: str, nodes: Sequence[str] = (), instances: Sequence[str] = ()) -> list[str]:
    """The names of a user's consumers where it may use no others: of a collector's nodes, a reward service's instances.

    They are durable. A user's own ending is not in them.
    """
    return [f"{role}-{place}" for place in {"collector": nodes, "reward": instances}.get(role, ())]


def inbox_of(role: str, name: str) -> str:
    """What follows `_INBOX` in a user's inbox; a watcher's is where services may answer its questions."""
    return f"{WATCHER}.{name}" if role == WATCHER != name else name


def _sent(role: str, places: _Places) -> Iterator[str]:
    for kind in KINDS:
        if role in kind.senders:
            yield from _subjects(kind, places)
    if role == "learner":
        yield from (f"$O.{POLICIES.bucket}.C.*", f"$O.{POLICIES.bucket}.M.*")


def _read(role: str, places: _Places, names: Sequence[str]) -> Iterator[str]:
    """Requests to JetStream's API, by durable consumers of these names."""
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
        yield from _durable(stream, wanted, names) if role in DURABLE else _unnamed(stream, wanted)
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
        yield from (f"$JS.ACK.{stream}.{name}.>", f"$JS.ACK._.*.{stream}.{name}.>")


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
    return subjects.template(BY_NAME[kind], lambda _: ANY)
