"""The broker's authority: who may log in, and what each role may do; NATS's operator mode with scoped signing keys.

One file holds the seeds of the operator, of its accounts and of one signing key per role, and the list of issued keys.
A role's permissions are a template in its account's JWT; a user's JWT only says by its tags for which jobs, node or
instance it is, so that a new key works at once, without a change at the broker.

Accounts keep answers apart. JetStream sends an answer (an acknowledgement, a message that was asked for) to whatever
subject the request names, with the server's own rights: in the account of the streams it would be stored there as a
message, or carried out as a request to delete a stream. From the accounts `trainers` and `services` nothing reaches the
streams but the requests that they import, and an answer that comes back is not sent on as a request.
"""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.credentials import Credential, Key, credential_of
from dynamix.runtime.input_files import read_regular
from dynamix.schemas import subjects
from dynamix.schemas.codec import MAX_TRAINER_BYTES
from dynamix.schemas.kinds import BY_NAME, KINDS, SERVICES, WATCHER, Kind
from dynamix.schemas.streams import ACTIONS, DEAD, FEED, JOBS, POLICIES, PROFILES
from dynamix.schemas.subjects import ANY, covers

PROVISION = "provision"
ROLES = (*SERVICES, WATCHER, PROVISION)
STREAMS_ACCOUNT, TRAINERS_ACCOUNT, SERVICES_ACCOUNT, SYSTEM_ACCOUNT = "streams", "trainers", "services", "system"
LIMITED_BY = {"trainer": "job", "collector": "node", "reward": "instance"}
"""What a key of these roles is for; other roles' keys are for all."""
DURABLES = {"collector": ("report", "node"), "reward": ("window", "instance")}
"""Roles that read by a durable consumer of FEED, which is made with the key: the kind, and what limits it."""

API = "$JS.API."
DAY_S = 24 * 3600
HEADER_BYTES = 4096
"""Room for a message's headers, which the broker counts, too."""
TEMPORARY_S = 300
"""For how long the keys work that `dynamix keys` signs for itself."""
MAX_TRAINER_CONNECTIONS = 10_000
"""A flood of connections by trainers leaves the rest of the broker's 65,536 to services."""
MAX_SUBSCRIPTIONS = dict.fromkeys(LIMITED_BY, 32)
"""Others may have 1,000."""

_READS = {
    "arbitrator": (JOBS.name, FEED.name, ACTIONS.name, PROFILES.name, POLICIES.name),
    "learner": (JOBS.name, FEED.name, ACTIONS.name, POLICIES.name),
    WATCHER: (ANY,),
}
_UNLIMITED = {
    **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf", "streams", "consumer"), -1),
    "wildcards": True,
}
_MANY_ANSWERS = r"\$JS\.API\.(CONSUMER\.MSG\.NEXT\..+|DIRECT\.GET\.[^.]+)"
"""Requests that have more than one."""
_HEAD = """\
# Who may log in: included by nats.conf, written by `dynamix keys`; it holds signed public keys and no secret. The
# broker reads it when it starts; later changes reach it by its system account, and stay in the resolver's directory.
"""


class AuthorityError(ValueError):
    """What cannot be issued or revoked, or an authority that cannot be used; the text says why and how to fix it."""


class IssuedKey(msgspec.Struct, kw_only=True):
    """One key that was issued."""

    name: str
    role: str
    public: str
    tags: tuple[str, ...] = ()
    issued: int
    """Unix time, as the others."""
    expires: int
    revoked: int | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the broker lets it in."""
        return self.revoked is None and self.expires > time.time()

    @property
    def durable(self) -> str | None:
        """The durable consumer that it reads by."""
        return next((tag.partition(":")[2] for tag in self.tags if tag.startswith("durable:")), None)

    @property
    def filter(self) -> str:
        """What that consumer delivers."""
        kind, limit = DURABLES[self.role]
        places = dict(tag.split(":", 1) for tag in self.tags)
        return subjects.template(BY_NAME[kind], lambda token: places[limit] if token == limit else ANY)


class Authority(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All secrets of the broker's authority, and what was issued."""

    operator: str
    """Seeds, as all others."""
    accounts: dict[str, str]
    signing_keys: dict[str, str]
    """By role."""
    keys: list[IssuedKey] = []

    @classmethod
    def new(cls) -> "Authority":
        """A new authority, without users."""
        names = (STREAMS_ACCOUNT, TRAINERS_ACCOUNT, SERVICES_ACCOUNT, SYSTEM_ACCOUNT)
        return cls(
            operator=Key.generate("operator").seed,
            accounts={name: Key.generate("account").seed for name in names},
            signing_keys={role: Key.generate("account").seed for role in ROLES},
        )

    @classmethod
    def read(cls, path: Path) -> "Authority":
        """Read the file. Raises AuthorityError when it is none, OSError when it cannot be read."""
        try:
            return msgspec.json.decode(read_regular(path), type=cls)
        except msgspec.DecodeError as error:
            raise AuthorityError(f"{path} is not an authority of `dynamix keys` ({error}): restore a copy") from error

    def write(self, path: Path) -> None:
        """Write the file, closed to others, and the broker's accounts.conf in the folder above its own."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        output_files.write(path, content, mode=0o600)
        accounts = path.absolute().parent.parent / "accounts.conf"
        output_files.write(accounts, self.accounts_conf().encode())
        accounts.chmod(0o644)  # whatever the umask: the broker runs as another user

    def issue(self, name: str, role: str, limits: Sequence[str], *, days: int) -> Credential:
        """Issue a key for `limits`: names of jobs, nodes or instances, by role.

        Raises AuthorityError for what no key can be for.
        """
        other = next((key for key in self.keys if key.name == name and key.role != role), None)
        if other is not None or (name in ROLES and name != role):
            what = f"the keys of {name} are a {other.role}'s" if other else f"{name} is the name of another role"
            raise AuthorityError(f"{what}: choose another name")
        try:
            for token in (name, *limits):
                subjects.check_token(token)
        except ValueError as error:
            raise AuthorityError(str(error)) from error
        limit = LIMITED_BY.get(role)
        if (limit is not None) != bool(limits):
            what = f"a {role}'s key is for what is named: add --{limit} NAME" if limit else f"a {role} has no limits"
            raise AuthorityError(what)
        if role in DURABLES and len(limits) > 1:
            raise AuthorityError(f"a {role}'s key is for one {limit}: make a key for each of {', '.join(limits)}")
        tags = tuple(f"{limit}:{value}" for value in limits)
        if role in DURABLES:
            tags += (f"durable:{role}-{limits[0]}",)
        now = int(time.time())
        expires = now + days * DAY_S
        credential = self._sign(name, role, tags, expires)
        public = credential.public
        self.keys.append(IssuedKey(name=name, role=role, public=public, tags=tags, issued=now, expires=expires))
        return credential

    def temporary(self, role: str) -> Credential:
        """A key for `dynamix keys` itself, of a role or of the system account, which is not in the list."""
        return self._sign("keys", role, (), int(time.time()) + TEMPORARY_S)

    def revoke(self, name: str, *, only_old: bool = False) -> list[IssuedKey]:
        """Revoke a name's keys, or all but the newest; which. Raises AuthorityError where there is none."""
        keys = [key for key in self.keys if key.name == name and key.is_valid]
        revoked = keys[:-1] if only_old else keys
        if not revoked:
            what = "no older key" if only_old and keys else "no key that the broker lets in"
            raise AuthorityError(f"{name} has {what}: `dynamix keys list` shows all")
        for key in revoked:
            key.revoked = int(time.time())
        return revoked

    def account_jwts(self) -> dict[str, str]:
        """The JWT of each account by its public key: limits, templates, what it takes from others, revocations."""
        operator = Key(self.operator)
        public = {name: Key(seed).public for name, seed in self.accounts.items()}
        return {public[name]: operator.sign_jwt(public[name], name, self._claims(name, public)) for name in public}

    def accounts_conf(self) -> str:
        """What nats.conf includes."""
        operator, system = Key(self.operator), Key(self.accounts[SYSTEM_ACCOUNT]).public
        claims = {"type": "operator", "version": 2, "system_account": system}
        lines = [_HEAD + f"operator: {operator.sign_jwt(operator.public, 'dynamix', claims)}"]
        lines += [f"system_account: {system}", "resolver_preload {"]
        lines += [f"  {account}: {jwt}" for account, jwt in self.account_jwts().items()]
        return "\n".join([*lines, "}", ""])

    def _sign(self, name: str, role: str, tags: tuple[str, ...], expires: int) -> Credential:
        user, claims = Key.generate("user"), {"type": "user", "version": 2}
        if role == SYSTEM_ACCOUNT:  # by the account's own key, without a template: it may do all there
            issuer = Key(self.accounts[SYSTEM_ACCOUNT])
            claims |= {"subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
        else:
            issuer = Key(self.signing_keys[role])
            claims |= {"issuer_account": Key(self.accounts[_account_of(role)]).public, "tags": list(tags)}
        return credential_of(issuer.sign_jwt(user.public, name, claims, exp=expires), user.seed)

    def _claims(self, name: str, public: dict[str, str]) -> dict[str, Any]:
        claims: dict[str, Any] = {"type": "account", "version": 2, "exports": [], "imports": []}
        disk = -1 if name == STREAMS_ACCOUNT else 0
        claims["limits"] = _UNLIMITED | {"mem_storage": 0, "disk_storage": disk, "leaf": 0}
        if name == TRAINERS_ACCOUNT:
            claims["limits"]["conn"] = MAX_TRAINER_CONNECTIONS
        roles = [role for role in ROLES if _account_of(role) == name]
        claims["signing_keys"] = [_scope(Key(self.signing_keys[role]).public, role) for role in roles]
        now = time.time()
        revoked = {k.public: k.revoked for k in self.keys if k.role in roles and k.revoked and k.expires > now}
        if revoked:
            claims["revocations"] = revoked
        exchanged = list(_exchange())
        for kind in ("service", "stream"):
            exported = [subject for exporter, _, subject, what in exchanged if (exporter, what) == (name, kind)]
            for subject in _widest(exported):
                many = {"response_type": "Stream"} if re.fullmatch(_MANY_ANSWERS, subject) else {}
                claims["exports"].append({"name": subject, "subject": subject, "type": kind} | many)
        for exporter, importer, subject, kind in exchanged:
            if importer == name:
                imported = {"name": subject, "subject": subject, "type": kind}
                claims["imports"].append(imported | {"account": public[exporter]})
        return claims


def permissions_of(role: str) -> tuple[list[str], list[str]]:
    """What a role may publish on and subscribe to; `{{tag(job)}}` and the like stand for what its key is for."""
    inbox = "_INBOX.{{name()}}.>"
    if role == PROVISION:  # it forgets families of jobs, too
        return [f"{API}>", subjects.template(BY_NAME["profile"], lambda _: ANY)], [inbox]
    sent = [_subject(kind, role) for kind in KINDS if role in kind.senders]
    if role == "learner":
        sent += [f"$O.{POLICIES.bucket}.C.*", f"$O.{POLICIES.bucket}.M.*"]
    return [*sent, *_requests(role)], [inbox, *_heard(role)]


def _requests(role: str) -> Iterator[str]:
    """To JetStream: acknowledgements and questions, which all are for streams, or consumers, that stand in them."""
    if role == "trainer":
        for kind in (BY_NAME["job"], BY_NAME["action"]):
            yield f"{API}DIRECT.GET.{kind.carrier}.{_subject(kind, role)}"
    if role == "collector":  # to read a job's report before those of a flood
        yield f"{API}DIRECT.GET.{FEED.name}.{_subject(BY_NAME['report'], role)}"
    if role in DURABLES:
        durable = f"{FEED.name}.{{{{tag(durable)}}}}"
        yield f"{API}STREAM.INFO.{FEED.name}"
        yield from (f"{API}CONSUMER.{what}.{durable}" for what in ("INFO", "MSG.NEXT", "RESET"))
        yield from (f"$JS.ACK.{durable}.>", f"$JS.ACK._.*.{durable}.>")
    for stream in _READS.get(role, ()):
        yield from (f"{API}{what}.{stream}" for what in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET"))
    if role in ("arbitrator", WATCHER):  # for alerts, an arbitrator counts all users' requests, and what DEAD takes
        yield f"{API}INFO"
    if role == "arbitrator":
        yield f"{API}STREAM.INFO.{DEAD.name}"
    if role == "learner":
        yield f"{API}STREAM.PURGE.{POLICIES.name}"


def _heard(role: str) -> Iterator[str]:
    """A trainer hears rewards and traces as they are published; all else is heard as it is stored."""
    if role == WATCHER:
        yield f"{subjects.ANNOUNCED}.>"
    if role != "trainer":
        yield _subject(BY_NAME["live"], role)  # its own heartbeat, for health checks
    for kind in KINDS:
        if role in kind.receivers and kind.stream is not None:
            wanted = _subject(kind, role)
            yield wanted if role == "trainer" and not kind.stream.announces else subjects.announced(wanted)


def _subject(kind: Kind, role: str) -> str:
    """A kind's subject as a role's template has it."""
    limit = LIMITED_BY.get(role)
    places = {"service": ANY if role == WATCHER else role, "instance": ANY}
    if limit is not None:
        places |= {"name" if limit == "job" else limit: f"{{{{tag({limit})}}}}"}
    if role == "collector":
        places["instance"] = "{{tag(node)}}"
    return subjects.template(kind, lambda token: places.get(token, ANY))


def _account_of(role: str) -> str:
    return {"trainer": TRAINERS_ACCOUNT, PROVISION: STREAMS_ACCOUNT}.get(role, SERVICES_ACCOUNT)


def _scope(public: str, role: str) -> dict[str, Any]:
    publish, subscribe = permissions_of(role)
    template = {
        "pub": {"allow": publish},
        "sub": {"allow": subscribe},
        "subs": MAX_SUBSCRIPTIONS.get(role, 1000),
        "data": -1,
        "payload": MAX_TRAINER_BYTES + HEADER_BYTES if role == "trainer" else -1,
        "allowed_connection_types": ["STANDARD"],
    }
    return {"kind": "user_scope", "key": public, "role": role, "template": template}


def _exchange() -> Iterator[tuple[str, str, str, str]]:
    """What accounts take from each other: exporter, importer, subject, and `service` (requests) or `stream` (heard)."""
    for account in (TRAINERS_ACCOUNT, SERVICES_ACCOUNT):
        roles = [role for role in ROLES if _account_of(role) == account]
        asked = [subject for role in roles for subject in permissions_of(role)[0]]
        live = subjects.template(BY_NAME["live"], lambda _: ANY)
        for subject in _widest(subject for subject in asked if not covers(live, _any(subject))):
            yield (STREAMS_ACCOUNT, account, subject, "service")
        heard = [subject for role in roles for subject in permissions_of(role)[1]]
        for subject in _widest(subject for subject in heard if subject.startswith(f"{subjects.ANNOUNCED}.")):
            yield (STREAMS_ACCOUNT, account, subject, "stream")
    for kind in KINDS:
        if "trainer" in kind.receivers and kind.stream is not None and not kind.stream.announces:
            yield (SERVICES_ACCOUNT, TRAINERS_ACCOUNT, subjects.template(kind, lambda _: ANY), "stream")
    yield (TRAINERS_ACCOUNT, SERVICES_ACCOUNT, _any(_subject(BY_NAME["live"], "trainer")), "stream")


def _any(subject: str) -> str:
    """A template's subject for all keys of its role."""
    return ".".join(ANY if "{{" in token else token for token in subject.split("."))


def _widest(subjects: Iterable[str]) -> list[str]:
    """Filters that cover all these: a message that two of them took would be stored twice."""
    found = list(dict.fromkeys(map(_any, subjects)))
    narrow = {one for wide, one in itertools.permutations(found, 2) if covers(wide, one)}
    return [subject for subject in found if subject not in narrow]
