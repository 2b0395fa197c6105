"""Create, rotate, revoke and list the keys that let users in at the broker, each for certain jobs, nodes or instances.

  dynamix keys create alice --role trainer --job alice-1 --job alice-2
  dynamix keys create node-a --role collector --node node-a
  dynamix keys create reward-a --role reward --instance node-a
  dynamix keys rotate alice            # both keys work; then, once the new one is in use: keys revoke alice --old
  dynamix keys revoke alice
  dynamix keys refresh                 # after an upgrade: the permissions that this version needs
  dynamix keys shard b                 # a second account; then: keys create ... --shard b

It changes the file of users that the broker includes (users.conf), which holds public keys only; the secret goes into a
file of mode 0600, for DYNAMIX_NATS_NKEY_FILE. Run it on the broker's machine. A change is in force once the broker has
read its configuration again: `systemctl reload dynamix-nats`, or `docker compose -f deploy/compose.yaml kill -s HUP
nats`. That keeps the connections of all others, and ends those of a revoked key.
"""

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dynamix.cli.errors import CommandError, MisuseError, explained, reading
from dynamix.cli.output import add_json_argument, add_list, add_output_argument, write_result, writing
from dynamix.runtime import output_files
from dynamix.runtime.bus.broker.nkeys import UserKey, new_seed
from dynamix.runtime.bus.users.permissions import PROVISION, ROLES, inbox_of
from dynamix.runtime.bus.users.users_file import (
    ACCOUNTS_SUFFIX,
    DEFAULT,
    ROLE_ACCOUNT,
    User,
    UsersFileError,
    account_of,
    accounts_file,
    accounts_in,
    read_users,
    users_files,
    with_first_key,
)
from dynamix.runtime.input_files import read_regular
from dynamix.runtime.key_file import FIRST_LINE, key_file_text, read_key_file
from dynamix.runtime.output_files import FileKind
from dynamix.schemas.subjects import check_token

from . import changes

USERS_FILE = Path("/etc/dynamix/users/users.conf")
KEY = FileKind("a credential of `dynamix keys`", lambda head: head.startswith(FIRST_LINE.encode()))
ALL = "*"
IN_FORCE = "in force once the broker has read it: systemctl reload dynamix-nats (in a container: kill -s HUP)"
TWICE = "reload it twice, some seconds apart: an account that a reload finds new works from the next one on"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, act: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what)
        one.set_defaults(act=act)
        where = "the broker's file of users (default: %(default)s)"
        one.add_argument("--users", metavar="FILE", type=Path, default=USERS_FILE, help=where)
        if act is not _shard:
            what = "the users of this shard, in shard-NAME.conf beside that file"
            one.add_argument("--shard", metavar="NAME", type=_token, help=what)
        return one

    add_json_argument(add("list", _list, "List the users, what each is limited to, and its public keys."))
    creating = add("create", _create, "Let a new user in, and write its key.")
    rotating = add("rotate", _rotate, "Write a new key of a user; the one that it has stays good until it is revoked.")
    revoking = add("revoke", _revoke, "Let a user in no longer.")
    what = "Write the permissions of this version; where there is no file, one with a user and password per service."
    add("refresh", _refresh, what)
    what = "Make the users of a shard, an account of its own, with a key for `provision`; say how the broker gets it."
    sharding = add("shard", _shard, what)
    sharding.add_argument("name", metavar="NAME", type=_token, help="the shard")
    for one in (creating, rotating, revoking):
        one.add_argument("name", metavar="NAME", help="the user")
    creating.add_argument("--role", choices=ROLES, required=True, help="what it does on the bus")
    add_list(creating, "--job", "ID", "a job that this trainer is for, its whole id; may be repeated ('*': all jobs)")
    add_list(creating, "--node", "NODE", "a node that this collector is for; may be repeated ('*': all nodes)")
    what = "a reward service that this key is for: its DYNAMIX_INSTANCE, else its node; may be repeated (none: all)"
    add_list(creating, "--instance", "NAME", what)
    add_output_argument(sharding, KEY, "where to write that key (default: NAME-provision.nkey here)")
    for one in (creating, rotating):
        what = "where to write the key, with mode 0600 (default: NAME.nkey here)"
        add_output_argument(one, KEY, what)
    revoking.add_argument("--old", action="store_true", help="only what its newest key replaced: all its older ones")


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    if getattr(arguments, "shard", None) is not None:
        arguments.users = _users_of(arguments.users, arguments.shard)
        if not arguments.users.exists():
            raise CommandError(f"there is no {arguments.users}: make the shard with `dynamix keys shard NAME`")
    arguments.act(arguments)
    return 0


def _token(text: str) -> str:
    """An argument's type: the name of a shard."""
    try:
        return check_token(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _users_of(users: Path, shard: str) -> Path:
    """A shard's file of users, which a reload must find where the broker's configuration includes it."""
    return users.parent / f"shard-{shard}.conf"


def _list(arguments: argparse.Namespace) -> None:
    users = _read(arguments.users)
    rows = [("user", "role", "limited to", "in the account of", "logs in with"), *map(_row, users)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    write_result({"users": [_document(user) for user in users]}, "\n".join(lines), arguments.json)


def _create(arguments: argparse.Namespace) -> None:
    file = Path(arguments.output or f"{arguments.name}.nkey")
    if file.exists():
        fix = "remove it, if its user was revoked; else name another file with -o, or `rotate` for a new key of a user"
        raise CommandError(f"{file} is there already: {fix}")
    role, jobs, nodes = arguments.role, arguments.job, arguments.node
    for wanted, given, flag in (("trainer", jobs, "--job ID"), ("collector", nodes, "--node NODE")):
        if role == wanted and not given:
            what = f"a {role}'s key is for what is named: add {flag}, repeated for each"
            raise MisuseError(f"{what}, or {flag.split()[0]} '{ALL}' for all")
    seed = new_seed()
    with explained(ValueError, exit_code=2):
        user = User(
            name=arguments.name,
            role=role,
            jobs=() if ALL in jobs else tuple(jobs),
            nodes=() if ALL in nodes else tuple(nodes),
            instances=tuple(arguments.instance),
        )
    user = with_first_key(user, UserKey(seed).public)
    with _changing(arguments.users) as users:
        users[:] = changes.added(users, user)
    _write_key(file, seed, user)  # last: no key is written, or replaced, that the broker will not know
    what = f"{user.name}, {_limits(user) or f'a {role}'}"
    _say(f"{file} lets in {what}: set DYNAMIX_NATS_NKEY_FILE to it where it is used", IN_FORCE)
    shared = next((other for other in users if other.role == role and not other.keys), None)
    if user.is_limited and shared is not None:
        _say(f"{shared.name} still logs in with one password for all: `dynamix keys revoke {shared.name}` ends that")


def _rotate(arguments: argparse.Namespace) -> None:
    file, name = Path(arguments.output or f"{arguments.name}.nkey"), arguments.name
    if file.exists():
        with reading(file), explained(ValueError):
            holder = read_key_file(file).name
        if holder != name:
            raise CommandError(f"{file} is the key of {holder or 'another user'}: name another file with -o")
    seed = new_seed()
    with _changing(arguments.users) as users:
        users[:] = changes.rotated(users, name, UserKey(seed).public)
        user = changes.named(users, name)
    _write_key(file, seed, user)
    _say(*_warnings([user]))
    num_old = len(user.keys) - 1
    old = "the one before stays" if num_old == 1 else f"the {num_old} before stay"
    _say(f"{file} is a new key of {name}; {old} good until `dynamix keys revoke {name} --old`", IN_FORCE)


def _revoke(arguments: argparse.Namespace) -> None:
    with _changing(arguments.users) as users:
        users[:] = changes.revoked(users, arguments.name, only_old=arguments.old)
    what = "all keys of {} but the newest are revoked" if arguments.old else "{} is revoked"
    _say(what.format(arguments.name), IN_FORCE)


def _refresh(arguments: argparse.Namespace) -> None:
    if not arguments.users.exists():
        _check_included(arguments.users)
        _write_users(arguments.users, DEFAULT)
    else:
        with _changing(arguments.users) as users:
            _say(*_warnings(users))  # they are written as they are
    _say(f"{arguments.users} has the permissions of this version", IN_FORCE)


def _shard(arguments: argparse.Namespace) -> None:
    """Names of users may be those of other accounts: a key says which account it is of, a password would not."""
    name, users_file = arguments.name, _users_of(arguments.users, arguments.name)
    if name.endswith(ACCOUNTS_SUFFIX):
        what = f"no shard's name ends with {ACCOUNTS_SUFFIX}"
        raise MisuseError(f"{name!r} would be the file of another shard's accounts: {what}")
    file = Path(arguments.output or f"{name}-{PROVISION}.nkey")
    for path in (users_file, file):
        if path.exists():
            fix = f"a shard is made once; `keys create --shard {name}` adds users"
            raise CommandError(f"{path} is there already: {fix}")
    seed = new_seed()
    user = User(name=PROVISION, role=PROVISION, keys=(UserKey(seed).public,))
    _write_key(file, seed, user)
    _write_users(users_file, [user])
    folder = users_file.resolve().parent.name
    _say(
        f"{users_file} has its users, {file} lets in {PROVISION}. In nats.conf, once, as two more lines of `accounts`:",
        f'  {account_of(users_file)} {{ jetstream: enabled, include "{folder}/{users_file.name}" }}',
        f'  include "{folder}/{accounts_file(users_file).name}"',
        "and 2 GB more in `max_file_store`, such as 4GB instead of 2GB; restart the broker.",
        "Then `dynamix provision` with that key, and keys for its services and trainers:",
        f"  dynamix keys create NAME --role ROLE --shard {name}",
    )


def _write_key(file: Path, seed: str, user: User) -> None:
    inbox = inbox_of(user.role, user.name)
    text = key_file_text(seed, name=user.name, inbox=inbox, jobs=user.jobs, api=user.api, consumer=user.consumer)
    with writing(file):
        output_files.write(file, text.encode(), mode=0o600)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[User]]:
    """The users, to change in place; written when the block ends without an error. No other process changes them."""
    with reading(path.parent):
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        users = _read(path)
        _check_included(path)
        yield users
        _write_users(path, users)
    finally:
        os.close(directory)


def _check_included(path: Path) -> None:
    """Refuse to write files of which the broker would read one only, which names the other's accounts."""
    config = path.resolve().parent.parent / "nats.conf"
    included = f'"{path.resolve().parent.name}/{accounts_file(path).name}"'
    if config.exists() and included not in read_regular(config).decode():
        what = "does not include the accounts of keys, without which the broker will not start"
        fix = f"add the line `include {included}` to its `accounts`, beside that of the streams, in place of any other"
        raise CommandError(f"{config} {what}: {fix}")


def _write_users(path: Path, users: Iterable[User]) -> None:
    """Write both files, for all to read: the broker runs as a user of its own. Say so where it must read them twice."""
    texts, accounts = users_files(path, users), accounts_file(path)
    before = accounts_in(read_regular(accounts).decode()) if accounts.exists() else {}
    if path.exists() and not {name for name, is_used in accounts_in(texts[accounts]).items() if is_used} <= set(before):
        _say(TWICE)
    for file, text in texts.items():
        with writing(file):
            output_files.write(file, text.encode(), mode=0o644, make_parents=True)


def _read(path: Path) -> list[User]:
    try:
        return read_users(read_regular(path).decode(errors="replace"))
    except FileNotFoundError:
        fix = "name the broker's file with --users, or make one with `dynamix keys refresh`"
        raise CommandError(f"there is no {path}: {fix}") from None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except UsersFileError as error:
        raise CommandError(f"{path}: {error}") from error


def _row(user: User) -> tuple[str, str, str, str, str]:
    logins = " or ".join(user.keys) or "a password"
    return user.name, user.role, _limits(user) or "nothing", _account(user), logins


def _document(user: User) -> dict[str, Any]:
    """A user as data, without what is not to be known of its consumers."""
    shown = ("name", "role", "jobs", "nodes", "instances", "keys")
    return {name: getattr(user, name) for name in shown} | {"account": _account(user)}


def _account(user: User) -> str:
    return "the streams" if not user.account else "its role" if user.account == ROLE_ACCOUNT else "its own"


def _warnings(users: Iterable[User]) -> Iterator[str]:
    """What to say of services whose keys an earlier version wrote: they are in the account of the streams."""
    for user in users:
        if user.keys and user.role not in (PROVISION, "trainer") and not user.account:
            fix = f"once this version's services run, `create` another one, give it to them, and `revoke {user.name}`"
            yield f"{user.name}'s key is of an earlier version, and as strong as an operator's: {fix}"


def _limits(user: User) -> str:
    for what, names in (("jobs", user.jobs), ("node", user.nodes), ("instance", user.instances)):
        if names:
            return f"{what} {', '.join(names)}"
    return {"trainer": "all jobs", "collector": "all nodes"}.get(user.role, "")


def _say(*lines: str) -> None:
    if lines:
        print("\n".join(lines), file=sys.stderr)
