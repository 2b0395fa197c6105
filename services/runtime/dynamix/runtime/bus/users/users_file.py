"""The files of users that the broker includes: written as a whole, and read back to change them.

They hold no secret but the endings of consumers' names.

Each user is a comment that begins with `#: ` and says in JSON who it is, and what nats-server reads: a block for each
of its keys, or one with the variable of its password. Only the comments are read back.

A user with a key logs in to an account without streams, in a second file: a trainer of certain jobs to one of its own,
a service to that of its role. Only an operator (`provision`) and users with a password are in that of the streams.
JetStream sends its answers to whatever subject a client names for them, and asks no permission for that: in one account
with the streams a client could have them stored as messages of others, or carried out as requests. From another account
nothing reaches the streams but what that imports; and what comes in as an answer is no request.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dynamix.schemas.kinds import WATCHER
from dynamix.schemas.spelling import suggestion
from dynamix.schemas.subjects import check_token

from .permissions import (
    DURABLE,
    PROVISION,
    ROLES,
    Permissions,
    api_of,
    common,
    heard_by,
    outside,
    permissions_of,
    requests,
    said_by,
)

MARK = "#: "
HEAD = """\
# The users of the broker and what each may do: included by nats.conf, written by `dynamix keys`, with permissions
# generated from the table of kinds (dynamix.schemas.kinds). It holds public keys and names of variables; the names of
# consumers in it are not to be known to other users of the broker.
# nats-server reads it when it starts and when it is told to (SIGHUP); `dynamix keys --help` says how to change it.
"""
ACCOUNTS_HEAD = """\
# Accounts without streams, included by nats.conf beside that of the streams, written by `dynamix keys` with the file of
# users: one for the keys of each role, and one for each key that is for certain jobs. The last ones of these are empty:
# an account that a reload finds new takes a second reload.
"""
ACCOUNTS_SUFFIX = "-accounts"
SPARE_ACCOUNTS = 32
"""Keys for certain jobs that can be made between two reloads of the broker."""
CONSUMER_BYTES = 8
"""Random ones in the name of a durable consumer."""
ROLE_ACCOUNT = -1
"""In place of a number: the account of the user's role."""

_ROLES_WITH_KEYS = tuple(role for role in ROLES if role != PROVISION)


class UsersFileError(ValueError):
    """The file, or a user, cannot be used; the text says what is wrong and how to fix it."""


class User(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Who a user of the broker is."""

    name: str
    role: str
    jobs: tuple[str, ...] = ()
    """The jobs of a trainer; none: all."""
    nodes: tuple[str, ...] = ()
    """The nodes of a collector; none: all."""
    instances: tuple[str, ...] = ()
    """The instances of a reward service; none: all."""
    keys: tuple[str, ...] = ()
    """Public keys that it may log in with, the newest last; none: the password NATS_PASSWORD_<NAME>."""
    account: int = 0
    """Where it logs in: the number of its own account, or `ROLE_ACCOUNT`; 0: in that of the streams."""
    consumer: str = ""
    """What the names of its durable consumers end with, which only its key's file says."""

    def __post_init__(self) -> None:
        for token in (self.name, *self.jobs, *self.nodes, *self.instances):
            check_token(token)
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is none of {', '.join(ROLES)}{suggestion(self.role, ROLES)}")
        if self.name in ROLES and self.name != self.role:
            raise ValueError(f"the name {self.name!r} is that of another role: it would share its inbox")
        if self.jobs and self.role != "trainer":
            raise ValueError(f"a {self.role} has no jobs of its own: only a trainer can be limited to jobs")
        if self.nodes and self.role != "collector":
            raise ValueError(f"a {self.role} has no node of its own: only a collector can be limited to nodes")
        if self.instances and self.role != "reward":
            raise ValueError(f"a {self.role} has no instance of its own: only a reward can be limited to instances")

    @property
    def is_limited(self) -> bool:
        """Whether it is for certain jobs, nodes or instances only."""
        return bool(self.jobs or self.nodes or self.instances)

    @property
    def api(self) -> str:
        """Prefix of its requests to JetStream, where that is not the server's own."""
        return api_of(self.role) if self.account and self.role != "trainer" else ""


DEFAULT = tuple(User(name=role, role=role) for role in ROLES)
"""One user per role, with a password: no job is kept from another."""


def with_first_key(user: User, key: str) -> User:
    """A new user with a public key."""
    account = ROLE_ACCOUNT if user.role != PROVISION and not user.jobs else 0
    consumer = secrets.token_hex(CONSUMER_BYTES) if user.role in DURABLE else ""
    return msgspec.structs.replace(user, keys=(key,), account=account, consumer=consumer)


def users_files(path: Path, users: Iterable[User]) -> Mapping[Path, str]:
    """The texts of the file of users, and of that of their accounts beside it."""
    users = numbered(users)
    streams = account_of(path)
    return {accounts_file(path): write_accounts(users, streams), path: write_users(users, streams)}


def accounts_file(path: Path) -> Path:
    """The file of accounts beside a file of users."""
    return path.with_name(f"{path.stem}{ACCOUNTS_SUFFIX}.conf")


def accounts_in(text: str) -> dict[str, bool]:
    """The accounts in the text of a file of accounts by name, and whether there is anything in them."""
    heads = [line for line in text.splitlines() if line and line[0] not in " #}"]
    return {line.split()[0]: line.endswith("{") for line in heads}


def account_of(path: Path) -> str:
    """The account whose users a file has: that of a shard, or the first one."""
    shard = path.stem.removeprefix("shard-")
    return "DYNAMIX" if shard == path.stem else f"SHARD_{shard.upper().replace('-', '_')}"


def numbered(users: Iterable[User]) -> list[User]:
    """With an account for each trainer that has a key, of this version or before; those of certain jobs have numbers.

    One that has a number keeps it, since a user that moves is disconnected.
    """
    found: list[User] = []
    users = list(users)
    taken = {user.account for user in users}
    given: set[int] = set()
    for user in users:
        number = 0 if user.account in given else user.account
        if user.role == "trainer" and user.keys and number == 0:
            number = next(free for free in range(1, len(taken) + 2) if free not in taken) if user.jobs else ROLE_ACCOUNT
            taken.add(number)
        given |= {number} if number > 0 else set()
        found.append(msgspec.structs.replace(user, account=number))
    return found


def write_accounts(users: Iterable[User], streams: str) -> str:
    """The text of the file of accounts, beside the account `streams`. The users have their numbers."""
    users, lines = list(users), [ACCOUNTS_HEAD]
    owners = {user.account: user for user in users if user.account > 0}
    for role in _ROLES_WITH_KEYS:
        within = [user for user in users if user.role == role and user.account == ROLE_ACCOUNT]
        jobs = [_of_jobs(streams, number) for number in sorted(owners)] if role == WATCHER else []
        lines += _block(_of_role(streams, role), _account(streams, User(name=role, role=role), within, jobs))
    for number in range(1, max(owners, default=0) + SPARE_ACCOUNTS + 1):
        name, owner = _of_jobs(streams, number), owners.get(number)
        if owner is None:
            lines.append(f"{name} {{ users: [] }}")
        else:
            lines += _block(name, _account(streams, owner, [owner]))
    return "\n".join([*lines, ""])


def _account(streams: str, needs: User, users: Sequence[User], trainers: Sequence[str] = ()) -> Iterator[str]:
    """An account with what a user needs; `trainers` are the accounts of certain jobs, where it hears those."""
    role, allowed = needs.role, _allowed(needs)
    yield from _users(users)
    yield from ("exports: [", *(f"  {{ stream: {json.dumps(subject)} }}" for subject in said_by(role)), "]")
    yield "imports: ["
    for one in requests(role, allowed):
        local = "" if one.local == one.subject else f", to: {json.dumps(one.local)}"
        yield f"  {{ service: {{ account: {streams}, subject: {json.dumps(one.subject)} }}{local} }}"
    for heard in heard_by(role, allowed):
        yield _stream(streams, heard)
        for other in (other for other in _ROLES_WITH_KEYS if other != role):
            found = (common(heard, said) for said in said_by(other))
            yield from (_stream(_of_role(streams, other), subject) for subject in found if subject is not None)
    yield from (_stream(trainer, subject) for trainer in trainers for subject in said_by("trainer"))
    yield "]"


def _block(name: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"{name} {{"
    yield from (f"  {line}" for line in lines)
    yield "}"


def _stream(account: str, subject: str) -> str:
    return f"  {{ stream: {{ account: {account}, subject: {json.dumps(subject)} }} }}"


def _of_role(streams: str, role: str) -> str:
    """In small letters, which no shard has."""
    return f"{streams}_{role}"


def _of_jobs(streams: str, number: int) -> str:
    return f"{streams}_jobs_{number}"


def read_users(text: str) -> list[User]:
    """The users in the text of the file. Raises UsersFileError, naming the line."""
    users = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith(MARK):
            try:
                users.append(msgspec.json.decode(line.strip()[len(MARK) :], type=User))
            except (msgspec.DecodeError, ValueError) as error:
                raise UsersFileError(f"line {number} is no user: {error}") from error
    if not users:
        raise UsersFileError("it has no users: it is not a file of `dynamix keys`")
    _check_whole(text, users)
    return users


def _check_whole(text: str, users: Sequence[User]) -> None:
    """Refuse a file of which the next change would keep only a part: one that is cut off, or has logins of others."""
    if "users: [" not in text or not text.rstrip().endswith("]"):
        raise UsersFileError("its end is missing: restore it from a copy")
    known = {user.name for user in users} | {key for user in users for key in user.keys}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").replace("{", " ").split()
        if words[:1] in (["user:"], ["nkey:"]) and words[1:] and words[1] not in known:
            fix = "put it into another file, which nats.conf includes in an account of its own"
            raise UsersFileError(f"line {number} lets in {words[1]}, whom `dynamix keys` does not know: {fix}")


def write_users(users: Iterable[User], streams: str) -> str:
    """The text of the file of users; the logins of those outside the account `streams` are in the file of accounts."""
    users = list(users)
    lines = [HEAD, *(f"{MARK}{msgspec.json.encode(user).decode()}" for user in users), ""]
    lines += [*_users(user for user in users if not user.account), ""]
    lines += ["# What accounts without streams may import, each what its users may do.", "exports: ["]
    allowed = {role: permissions_of(role, role) for role in _ROLES_WITH_KEYS}
    for one in dict.fromkeys(one for role in allowed for one in requests(role, allowed[role])):
        answers = ", response: stream" if one.has_many_answers else ""
        lines.append(f"  {{ service: {json.dumps(one.subject)}{answers} }}")
    for heard in dict.fromkeys(heard for role in allowed for heard in heard_by(role, allowed[role])):
        lines.append(f"  {{ stream: {json.dumps(heard)} }}")
    lines += ["]", "imports: [", *(_stream(_of_role(streams, WATCHER), said) for said in said_by(WATCHER))]
    return "\n".join([*lines, "]", ""])


def _users(users: Iterable[User]) -> Iterator[str]:
    yield "users: ["
    for user in users:
        for login in _logins(user):
            yield from ("  {", f"    {login}", *_permissions(user), "  }")
    yield "]"


def password_variable(name: str) -> str:
    """The variable that the broker reads a user's password from."""
    return f"NATS_PASSWORD_{name.upper().replace('-', '_')}"


def _logins(user: User) -> Iterator[str]:
    if not user.keys:
        yield f"user: {user.name}, password: ${password_variable(user.name)}"
    yield from (f"nkey: {key}" for key in user.keys)


def _allowed(user: User) -> Permissions:
    limits = {"jobs": user.jobs, "nodes": user.nodes, "instances": user.instances}
    return permissions_of(user.role, user.name, **limits, consumer=user.consumer)


def _permissions(user: User) -> Iterator[str]:
    allowed = outside(user.role, _allowed(user)) if user.account else _allowed(user)
    yield "    permissions {"
    yield from _list("publish", allowed.publish)
    yield from _list("subscribe", allowed.subscribe)
    yield "    }"


def _list(what: str, subjects: Iterable[str]) -> Iterator[str]:
    yield f"      {what}: ["
    yield from (f"        {json.dumps(subject)}" for subject in subjects)
    yield "      ]"
