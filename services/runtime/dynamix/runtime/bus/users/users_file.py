"""The files of users that the broker includes: written as a whole, and read back to change them; they hold no secret.

Each user is a comment that begins with `#: ` and says in JSON who it is, and what nats-server reads: a block for each
of its keys, or one with the variable of its password. Only the comments are read back.

A trainer of certain jobs logs in to an account of its own, in a second file. JetStream sends its answers to whatever
subject a client names for them, and asks no permission for that: within one account a client could have them stored as
messages of others, or carried out as requests. From an account of its own nothing reaches the streams' account but what
that account imports, which is what is of its jobs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dynamix.schemas.spelling import suggestion
from dynamix.schemas.subjects import check_token

from .permissions import ROLES, crossings, denied, fixed_consumers, permissions_of

MARK = "#: "
HEAD = """\
# The users of the broker and what each may do: included by nats.conf, written by `dynamix keys`, with permissions
# generated from the table of kinds (dynamix.schemas.kinds). It holds public keys and names of variables, no secret.
# nats-server reads it when it starts and when it is told to (SIGHUP); `dynamix keys --help` says how to change it.
"""
JOBS_HEAD = """\
# An account for each key that is for certain jobs, included by nats.conf beside the account of the streams; written by
# `dynamix keys` with the file of users. The last ones are empty: an account that a reload finds new takes a second one.
"""
SPARE_ACCOUNTS = 32
"""Keys that can be made between two reloads of the broker."""


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
    """The number of the account of a trainer of certain jobs; 0 until it is written."""

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
    def fixed_consumers(self) -> list[str]:
        """The names of its consumers, which no other user shall touch; none where they may be any."""
        return fixed_consumers(self.role, nodes=self.nodes, instances=self.instances)


DEFAULT = tuple(User(name=role, role=role) for role in ROLES)
"""One user per role, with a password: no job is kept from another."""


def users_files(path: Path, users: Iterable[User]) -> Mapping[Path, str]:
    """The texts of the file of users, and of that of their accounts beside it."""
    users = numbered(users)
    return {accounts_file(path): write_accounts(users, account_of(path)), path: write_users(users)}


def accounts_file(path: Path) -> Path:
    """The file of accounts beside a file of users."""
    return path.with_name(f"{path.stem}-jobs.conf")


def account_of(path: Path) -> str:
    """The account whose users a file has: that of a shard, or the first one."""
    shard = path.stem.removeprefix("shard-")
    return "DYNAMIX" if shard == path.stem else f"SHARD_{shard.upper().replace('-', '_')}"


def numbered(users: Iterable[User]) -> list[User]:
    """With a number for each account; one that has a number keeps it, since a user that moves is disconnected."""
    found: list[User] = []
    users = list(users)
    taken = {user.account for user in users}
    for user in users:
        number = user.account
        if user.jobs and number == 0:
            number = next(free for free in range(1, len(taken) + 2) if free not in taken)
            taken.add(number)
        found.append(msgspec.structs.replace(user, account=number))
    return found


def write_accounts(users: Iterable[User], account: str) -> str:
    """The text of the file of accounts. The users have their numbers."""
    tenants = {user.account: user for user in users if user.jobs}
    lines = [JOBS_HEAD]
    for number in range(1, max(tenants, default=0) + SPARE_ACCOUNTS + 1):
        user = tenants.get(number)
        if user is None:
            lines.append(f"{account}_JOBS_{number} {{ users: [] }}")
            continue
        lines += [f"{account}_JOBS_{number} {{", "  users: ["]
        for login in _logins(user):
            lines += ["  {", f"    {login}", *_permissions(user, ()), "  }"]
        lines += ["  ]", "  imports: ["]
        for kind, subject in crossings(permissions_of(user.role, user.name, jobs=user.jobs)):
            lines.append(f"    {{ {kind}: {{ account: {account}, subject: {json.dumps(subject)} }} }}")
        lines += ["  ]", "}"]
    return "\n".join([*lines, ""])


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
    if "users: [" in text and not text.rstrip().endswith("]"):
        raise UsersFileError("its end is missing: restore it from a copy")
    known = {user.name for user in users} | {key for user in users for key in user.keys}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").replace("{", " ").split()
        if words[:1] in (["user:"], ["nkey:"]) and words[1:] and words[1] not in known:
            fix = "put it into another file, which nats.conf includes in an account of its own"
            raise UsersFileError(f"line {number} lets in {words[1]}, whom `dynamix keys` does not know: {fix}")


def write_users(users: Iterable[User]) -> str:
    """The text of the file of users; the logins of those with an account of their own are in the file of accounts."""
    users, lines = list(users), [HEAD, "users: ["]
    fixed = sorted({name for user in users for name in user.fixed_consumers})
    for user in users:
        lines.append(f"  {MARK}{msgspec.json.encode(user).decode()}")
        for login in () if user.jobs else _logins(user):
            lines += ["  {", f"    {login}", *_permissions(user, fixed), "  }"]
    lines += ["]", "", "# What accounts of trainers may import, each what is of its jobs.", "exports: ["]
    for kind, subject in crossings(permissions_of("trainer", "trainer")):
        lines.append(f"  {{ {kind}: {json.dumps(subject)} }}")
    return "\n".join([*lines, "]", ""])


def password_variable(name: str) -> str:
    """The variable that the broker reads a user's password from."""
    return f"NATS_PASSWORD_{name.upper().replace('-', '_')}"


def _logins(user: User) -> Iterator[str]:
    if not user.keys:
        yield f"user: {user.name}, password: ${password_variable(user.name)}"
    yield from (f"nkey: {key}" for key in user.keys)


def _permissions(user: User, fixed: Sequence[str]) -> Iterator[str]:
    allowed = permissions_of(user.role, user.name, jobs=user.jobs, nodes=user.nodes, instances=user.instances)
    yield "    permissions {"
    refused = () if user.is_limited else tuple(denied(user.role, fixed))
    yield from _list("publish: { allow: [" if refused else "publish: [", allowed.publish, "]")
    if refused:
        yield from _list("deny: [", refused, "] }")
    yield from _list("subscribe: [", allowed.subscribe, "]")
    yield "    }"


def _list(head: str, subjects: Iterable[str], end: str) -> Iterator[str]:
    yield f"      {head}"
    yield from (f"        {json.dumps(subject)}" for subject in dict.fromkeys(subjects))
    yield f"      {end}"
