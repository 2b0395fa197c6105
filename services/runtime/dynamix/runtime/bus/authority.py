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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.credentials import Credential, Key
from dynamix.runtime.input_files import MAX_BYTES, read_secret
from dynamix.schemas import subjects
from dynamix.schemas.codec import MAX_TRAINER_BYTES
from dynamix.schemas.streams import ACTIONS, DAY_S, DEAD, FEED, JOBS, POLICIES, PROFILES, REPORTS
from dynamix.schemas.subjects import ANY, BY_NAME, KINDS, SERVICES, WATCHER, Kind, covers

PROVISION = "provision"
ROLES = (*SERVICES, WATCHER, PROVISION)
ACCOUNTS = ("streams", "trainers", "services", "system")
STREAMS_ACCOUNT, TRAINERS_ACCOUNT, SERVICES_ACCOUNT, SYSTEM_ACCOUNT = ACCOUNTS
LIMITED_BY = {"trainer": "job", "collector": "node", "reward": "instance"}
"""Kind of limit of the keys of these roles; keys of other roles have none."""
DURABLES = {"collector": "report", "reward": "window"}
"""Roles that read by a durable consumer, which is made with the key, and the kind that it delivers."""

API = "$JS.API."
HEADER_BYTES = 4096
"""Room for a message's headers, which the broker counts, too."""
TEMPORARY_S = 300
"""Lifetime of the keys that `dynamix keys` signs for itself."""
MAX_TRAINER_CONNECTIONS = 10_000
"""A flood of connections by trainers leaves the rest of the broker's 65,536 to services."""
MAX_SUBSCRIPTIONS = dict.fromkeys(ROLES, 1000) | dict.fromkeys(("trainer", "reward"), 32)

_LOOKED_UP = {"trainer": ("job", "action"), "collector": ("report",)}  # they ask for the newest one of a subject
_READS = {
    "arbitrator": (JOBS.name, FEED.name, ACTIONS.name, PROFILES.name, POLICIES.name),
    "learner": (JOBS.name, FEED.name, ACTIONS.name, POLICIES.name),
    WATCHER: (ANY,),
}
_ALSO = {
    "arbitrator": (f"{API}INFO", *(f"{API}STREAM.INFO.{stream.name}" for stream in (DEAD, REPORTS))),  # for alerts
    WATCHER: (f"{API}INFO",),
}
_UNLIMITED = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "streams", "consumer"), -1)
_MANY_ANSWERS = r"\$JS\.API\.(CONSUMER\.MSG\.NEXT\..+|DIRECT\.GET\.[^.]+)"
"""Requests that have more than one."""
_HEAD = """\
# Who may log in: included by nats.conf, written by `dynamix keys`; it holds signed public keys and no secret. The
# broker reads it when it starts; later changes reach it by its system account, and stay in the resolver's directory.
"""


class IssuedKey(msgspec.Struct, kw_only=True):
    """One key that was issued; times are Unix times."""

    name: str
    role: str
    public: str
    tags: tuple[str, ...] = ()
    issued: int
    expires: int
    revoked: int | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the broker lets it in."""
        return self.revoked is None and self.expires > time.time()

    @property
    def durable(self) -> tuple[str, str, str] | None:
        """The durable consumer that it reads by: its stream, its name, its filter."""
        if self.role not in DURABLES:
            return None
        limit, value = self.tags[0].split(":")
        kind = BY_NAME[DURABLES[self.role]]
        wanted = subjects.template(kind, lambda token: value if token == limit else ANY)
        return kind.carrier, f"{self.role}-{value}", wanted


class Authority(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All secrets of the broker's authority: seeds, those that sign users by role; and what was issued."""

    operator: str
    accounts: dict[str, str]
    signing_keys: dict[str, str]
    keys: list[IssuedKey] = []

    @classmethod
    def new(cls) -> "Authority":
        """A new authority, without users."""
        accounts = {name: Key.generate("account").seed for name in ACCOUNTS}
        signing_keys = {role: Key.generate("account").seed for role in ROLES}
        return cls(operator=Key.generate("operator").seed, accounts=accounts, signing_keys=signing_keys)

    @classmethod
    def read(cls, path: Path) -> "Authority":
        """Read the file. Raises ValueError if it is no authority, OSError if it cannot be read."""
        try:
            return msgspec.json.decode(read_secret(path, max_bytes=MAX_BYTES), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not an authority of `dynamix keys` ({error}): restore a copy") from error

    def write(self, path: Path) -> None:
        """Write the file, closed to others, and the broker's accounts.conf in the folder above its own."""
        output_files.write(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n", mode=0o600)
        operator, system = Key(self.operator), Key(self.accounts[SYSTEM_ACCOUNT]).public
        claims = {"type": "operator", "version": 2, "system_account": system}
        jwt = operator.sign_jwt(operator.public, "dynamix", claims)
        preload = "".join(f"  {account}: {signed}\n" for account, signed in self.account_jwts().items())
        text = f"{_HEAD}operator: {jwt}\nsystem_account: {system}\nresolver_preload {{\n{preload}}}\n"
        accounts = path.absolute().parent.parent / "accounts.conf"
        output_files.write(accounts, text.encode())
        accounts.chmod(0o644)  # whatever the umask: the broker runs as another user

    def issue(self, name: str, role: str, limits: Sequence[str], *, days: int) -> Credential:
        """Issue a key for `limits`: names of jobs, nodes or instances, by role. Raises ValueError where none can be."""
        other = next((key for key in self.keys if key.name == name and key.role != role), None)
        if other is not None or (name in ROLES and name != role):
            what = f"the keys of {name} are a {other.role}'s" if other else f"{name} is the name of another role"
            raise ValueError(f"{what}: choose another name")
        limit = LIMITED_BY.get(role)
        for token in (name, *limits):
            subjects.check_token(token)
        if (limit is not None) != bool(limits):
            fault = f"a {role}'s key is for what is named: add --{limit} NAME" if limit else f"a {role} has no limits"
            raise ValueError(fault)
        if role in DURABLES and len(limits) > 1:
            raise ValueError(f"a {role}'s key is for one {limit}: make a key for each of {', '.join(limits)}")
        tags = tuple(f"{limit}:{value}" for value in limits)
        now = int(time.time())
        new = self._sign(name, role, tags, now + days * DAY_S)
        key = IssuedKey(name=name, role=role, public=new.public, tags=tags, issued=now, expires=now + days * DAY_S)
        self.keys.append(key)
        return new

    def temporary(self, role: str) -> Credential:
        """A key for `dynamix keys` itself, of a role or of the system account, which is not in the list."""
        return self._sign("keys", role, (), int(time.time()) + TEMPORARY_S)

    def revoke(self, name: str, *, only_old: bool = False) -> list[IssuedKey]:
        """Revoke a user's keys, or all but the newest; returns them. Raises ValueError if there are none."""
        keys = [key for key in self.keys if key.name == name and key.is_valid]
        revoked = keys[:-1] if only_old else keys
        if not revoked:
            what = "no older key" if only_old and keys else "no key that the broker lets in"
            raise ValueError(f"{name} has {what}: `dynamix keys list` shows all")
        for key in revoked:
            key.revoked = int(time.time())
        return revoked

    def account_jwts(self) -> dict[str, str]:
        """The JWT of each account by its public key: limits, templates, what it takes from others, revocations."""
        operator, now = Key(self.operator), time.time()
        public, jwts = {name: Key(seed).public for name, seed in self.accounts.items()}, {}
        for name, account in public.items():
            roles = [role for role in ROLES if _account_of(role) == name]
            limits = _UNLIMITED | {"mem_storage": 0, "leaf": 0, "wildcards": True}
            limits["conn"] = MAX_TRAINER_CONNECTIONS if name == TRAINERS_ACCOUNT else -1
            taken = {
                subject: what for each in ACCOUNTS for exporter, what, subject in _imports(each) if exporter == name
            }
            exports = []
            for subject in _widest(taken):
                many = {"response_type": "Stream"} if re.fullmatch(_MANY_ANSWERS, subject) else {}
                exports.append({"name": subject, "subject": subject, "type": taken[subject]} | many)
            claims: dict[str, Any] = {
                "type": "account",
                "version": 2,
                "limits": limits | {"disk_storage": -1 if name == STREAMS_ACCOUNT else 0},
                "signing_keys": [_scope(role) | {"key": Key(self.signing_keys[role]).public} for role in roles],
                "imports": [
                    {"name": subject, "subject": subject, "type": what, "account": public[exporter]}
                    for exporter, what, subject in _imports(name)
                ],
                "exports": exports,
            }
            revoked = {k.public: k.revoked for k in self.keys if k.role in roles and k.revoked and k.expires > now}
            claims |= {"revocations": revoked} if revoked else {}
            jwts[account] = operator.sign_jwt(account, name, claims)
        return jwts

    def _sign(self, name: str, role: str, tags: tuple[str, ...], expires: int) -> Credential:
        user, claims = Key.generate("user"), {"type": "user", "version": 2}
        if role == SYSTEM_ACCOUNT:  # by the account's own key, without a template: it may do all there
            issuer = Key(self.accounts[SYSTEM_ACCOUNT])
            claims |= {"subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
        else:
            issuer = Key(self.signing_keys[role])
            claims |= {"issuer_account": Key(self.accounts[_account_of(role)]).public, "tags": list(tags)}
        jwt = issuer.sign_jwt(user.public, name, claims, exp=expires)
        return Credential(jwt, user.seed, name, user.public, tags, expires)


def permissions_of(role: str) -> tuple[list[str], list[str]]:
    """Permissions of a role to publish and subscribe; `{{tag(job)}}` and the like stand for the limits of its key."""
    sent, heard = [_subject(kind, role) for kind in KINDS if role in kind.senders], ["_INBOX.{{name()}}.>"]
    if role == PROVISION:  # it forgets families of jobs, too
        return [f"{API}>", _subject(BY_NAME["profile"], role)], heard
    sent += _ALSO.get(role, ())
    for kind in (BY_NAME[name] for name in _LOOKED_UP.get(role, ())):
        sent.append(f"{API}DIRECT.GET.{kind.carrier}.{_subject(kind, role)}")
    if role != "trainer":
        heard.append(_subject(BY_NAME["live"], role))  # its own heartbeat, for health checks
    if role in DURABLES:
        stream = BY_NAME[DURABLES[role]].carrier
        durable = f"{stream}.{role}-{{{{tag({LIMITED_BY[role]})}}}}"
        sent += [f"{API}CONSUMER.{what}.{durable}" for what in ("INFO", "MSG.NEXT", "RESET")]
        sent += [f"{API}STREAM.INFO.{stream}", f"$JS.ACK.{durable}.>", f"$JS.ACK._.*.{durable}.>"]
    for stream in _READS.get(role, ()):
        sent += [f"{API}{what}.{stream}" for what in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")]
    if role == WATCHER:
        heard.append(f"{subjects.ANNOUNCED}.>")
    for kind in KINDS:
        if role in kind.receivers and kind.stream is not None and role not in DURABLES:
            wanted, at_once = _subject(kind, role), role == "trainer" and not kind.stream.announces
            heard.append(wanted if at_once else subjects.announced(wanted))  # a trainer hears traces as they are sent
    return sent, heard


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


def _scope(role: str) -> dict[str, Any]:
    publish, subscribe = permissions_of(role)
    payload = MAX_TRAINER_BYTES + HEADER_BYTES if role == "trainer" else -1
    template: dict[str, Any] = {"subs": MAX_SUBSCRIPTIONS[role], "data": -1, "payload": payload}
    template |= {"pub": {"allow": publish}, "sub": {"allow": subscribe}, "allowed_connection_types": ["STANDARD"]}
    return {"kind": "user_scope", "role": role, "template": template}


def _imports(account: str) -> list[tuple[str, str, str]]:
    """Imports of an account: the exporter, `service` (requests) or `stream` (what is heard), a subject."""
    allowed = [permissions_of(role) for role in ROLES if _account_of(role) == account]
    if account == STREAMS_ACCOUNT or not allowed:
        return []
    live = _subject(BY_NAME["live"], WATCHER)
    sent, heard = (_widest(itertools.chain(*subjects)) for subjects in zip(*allowed, strict=True))
    taken = [(STREAMS_ACCOUNT, "service", subject) for subject in sent if not covers(live, subject)]
    taken += [(STREAMS_ACCOUNT, "stream", subject) for subject in heard if covers(f"{subjects.ANNOUNCED}.>", subject)]
    if account == SERVICES_ACCOUNT:
        return [*taken, (TRAINERS_ACCOUNT, "stream", live.replace(ANY, "trainer", 1))]
    at_once = [kind for kind in KINDS if "trainer" in kind.receivers and kind.stream and not kind.stream.announces]
    return [*taken, *((SERVICES_ACCOUNT, "stream", _subject(kind, PROVISION)) for kind in at_once)]


def _widest(subjects: Iterable[str]) -> list[str]:
    """Filters that cover all these, of all keys: a message that two of them took would be stored twice."""
    found = dict.fromkeys(re.sub(r"[^.]*\{\{[^.]*", ANY, subject) for subject in subjects)
    narrow = {one for wide, one in itertools.permutations(found, 2) if covers(wide, one)}
    return [subject for subject in found if subject not in narrow]
