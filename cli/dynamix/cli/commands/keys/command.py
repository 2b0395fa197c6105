"""Create, revoke and list the keys that let users in at the broker, each for certain jobs, a node or an instance.

  dynamix keys init --credentials /etc/dynamix/credentials --node node-a   # once, before the broker's first start
  dynamix keys create alice --role trainer --job mnist --job resnet        # all runs of jobs of these names
  dynamix keys create node-b --role collector --node node-b
  dynamix keys create alice --role trainer --job mnist -o new.creds        # one more; both work until:
  dynamix keys revoke alice --old
  dynamix keys revoke alice
  dynamix keys refresh                  # after an upgrade, or when the broker could not be reached

`init` makes the authority, a file that holds all secrets, and the accounts.conf that nats.conf includes, in the folder
above it. A key is a file of mode 0600 for DYNAMIX_NATS_CREDS_FILE; it works at once, without a reload. What the broker
has to learn (a revocation, the consumer that a collector or reward service reads by) it is told at DYNAMIX_NATS_URL.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import fcntl
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from dynamix.cli.connection import connected
from dynamix.cli.errors import MISUSED, CommandError, check_counts, explained, reading
from dynamix.cli.output import add_json_argument, add_list, add_output_argument, write_result, writing
from dynamix.runtime import output_files
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.authority import (
    DURABLES,
    LIMITED_BY,
    PROVISION,
    ROLES,
    SYSTEM_ACCOUNT,
    Authority,
    AuthorityError,
    IssuedKey,
)
from dynamix.runtime.bus.provision import push_accounts
from dynamix.runtime.bus.streams.durable import make_durable, remove_durable
from dynamix.runtime.credentials import Credential
from dynamix.runtime.output_files import FileKind
from dynamix.runtime.settings import BusSettings, SettingsError, SharedSettings, node_name, read

AUTHORITY = Path("/etc/dynamix/authority/authority.json")
CREDENTIALS = Path("/etc/dynamix/credentials")
CREDENTIAL = FileKind("a credential of `dynamix keys`", lambda head: head.startswith(b"-----BEGIN NATS USER JWT"))
DAYS = 365
BROKER_TIMEOUT_S = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, act: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what)
        one.set_defaults(act=act)
        where = "the file of the authority (default: %(default)s)"
        one.add_argument("--authority", metavar="FILE", type=Path, default=AUTHORITY, help=where)
        return one

    starting = add("init", _init, "Make the authority, accounts.conf, and the credentials of this machine's services.")
    what = "where to write the credentials, a file NAME.creds each (default: %(default)s)"
    starting.add_argument("--credentials", metavar="DIR", type=Path, default=CREDENTIALS, help=what)
    add_list(starting, "--node", "NODE", "a node that gets a collector's credential; may be repeated (default: this)")
    starting.add_argument("--instance", default="1", help="of the reward service (default: %(default)s)")
    creating = add("create", _create, "Issue a key, and write it.")
    revoking = add("revoke", _revoke, "Revoke a name's keys, and end their connections.")
    for one in (creating, revoking):
        one.add_argument("name", metavar="NAME", help="whose key it is")
    creating.add_argument("--role", choices=ROLES, required=True, help="what it does on the bus")
    add_list(creating, "--job", "NAME", "the name of a trainer's jobs, of which it may run all; may be repeated")
    add_list(creating, "--node", "NODE", "the node of a collector")
    add_list(creating, "--instance", "NAME", "a reward service's DYNAMIX_INSTANCE, else its node")
    what = "where to write the key, with mode 0600 (default: NAME.creds here)"
    add_output_argument(creating, CREDENTIAL, what)
    for one in (starting, creating):
        what = "for how long it works (default: %(default)s)"
        one.add_argument("--days", type=int, default=DAYS, metavar="N", help=what)
    revoking.add_argument("--old", action="store_true", help="all but the newest key of that name")
    add_json_argument(add("list", _list, "List the keys, what each is for, and until when it works."))
    add("refresh", _refresh, "Give the broker the permissions of this version, all revocations, and missing consumers.")


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    if "days" in arguments:
        check_counts(arguments, "days")
    with explained(AuthorityError, exit_code=MISUSED):
        arguments.act(arguments)
    return 0


def _init(arguments: argparse.Namespace) -> None:
    path: Path = arguments.authority
    if path.exists():
        raise CommandError(f"{path} exists: `dynamix keys create` adds keys to it, and nothing replaces it")
    authority, days = Authority.new(), arguments.days
    nodes = arguments.node or [node_name(read(SharedSettings, "", os.environ))]
    limits = {"collector": nodes, "reward": [arguments.instance]}
    issued = []
    for role in (role for role in ROLES if role != "trainer"):
        for limit in limits.get(role, [""]):
            name = f"{role}-{limit}" if role == "collector" else role
            issued.append(authority.issue(name, role, [limit] if limit else [], days=days))
    with writing(path):
        for folder in (path.parent, arguments.credentials):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        for credential in issued:
            _write(arguments.credentials / f"{credential.name}.creds", credential)
        authority.write(path)
    names = ", ".join(f"{credential.name}.creds" for credential in issued)
    _say(f"{path} is the authority: keep a copy in a safe place; {arguments.credentials} has {names}")
    _say("start the broker; then run `dynamix provision` with provision.creds, and `dynamix keys refresh`")


def _create(arguments: argparse.Namespace) -> None:
    file = Path(arguments.output or f"{arguments.name}.creds")
    role = arguments.role
    for option in LIMITED_BY.values():
        if getattr(arguments, option) and LIMITED_BY.get(role) != option:
            raise AuthorityError(f"--{option} is not for a {role}'s key: leave it out")
    if file.exists():
        raise CommandError(f"{file} exists: name another file with -o, or remove this one")
    limits = getattr(arguments, LIMITED_BY[role]) if role in LIMITED_BY else []
    with _changing(arguments.authority) as authority:
        credential = authority.issue(arguments.name, role, limits, days=arguments.days)
    with writing(file):  # last: a key that is not in the list could not be revoked
        _write(file, credential)
    until = dt.datetime.fromtimestamp(credential.expires_s or 0, dt.UTC)
    _say(f"{file} is a key of {arguments.name} until {until:%Y-%m-%d}: name it in DYNAMIX_NATS_CREDS_FILE")
    if role in DURABLES:
        try:
            asyncio.run(_durables(authority, make=authority.keys[-1:]))
        except CommandError as error:
            _say(f"the consumer that it reads by is missing: run `dynamix keys refresh` later ({error})")


def _revoke(arguments: argparse.Namespace) -> None:
    with _changing(arguments.authority) as authority:
        revoked = authority.revoke(arguments.name, only_old=arguments.old)
    _say(f"revoked {len(revoked)} key(s) of {arguments.name}")
    kept = {key.durable for key in authority.keys if key.is_valid}
    try:
        asyncio.run(_push(authority))
    except CommandError as error:
        what = "but the broker does not know it yet: restart it, or run `dynamix keys refresh` once it answers"
        raise CommandError(f"it is written, {what} ({error})") from error
    asyncio.run(_durables(authority, remove=[key.durable for key in revoked if key.durable not in kept]))


def _refresh(arguments: argparse.Namespace) -> None:
    with _changing(arguments.authority) as authority:
        pass  # writing it signs the accounts again
    asyncio.run(_push(authority))
    asyncio.run(_durables(authority, make=[key for key in authority.keys if key.is_valid]))
    _say("the broker has the permissions of this version")


def _list(arguments: argparse.Namespace) -> None:
    keys = _read(arguments.authority).keys
    rows = [("name", "role", "for", "works until", "public key")]
    for key in keys:
        limits = ", ".join(tag for tag in key.tags if not tag.startswith("durable:")) or "all"
        until = "revoked" if key.revoked else f"{dt.datetime.fromtimestamp(key.expires, dt.UTC):%Y-%m-%d}"
        rows.append((key.name, key.role, limits, until, key.public))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    write_result({"keys": [msgspec.to_builtins(key) for key in keys]}, "\n".join(lines), arguments.json)


def _read(path: Path) -> Authority:
    if not path.exists():
        fix = "name it with --authority, or make one with `dynamix keys init`"
        raise CommandError(f"there is no authority at {path}: {fix}")
    with reading(path):
        return Authority.read(path)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[Authority]:
    """The authority, to change; written when the block ends without an error. No other process changes it meanwhile."""
    authority = _read(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        authority = _read(path)
        yield authority
        with writing(path):
            authority.write(path)
    finally:
        os.close(directory)


def _write(file: Path, credential: Credential) -> None:
    output_files.write(file, credential.text().encode(), mode=0o600)


async def _push(authority: Authority) -> None:
    async with _as(authority.temporary(SYSTEM_ACCOUNT)) as bus:
        await push_accounts(bus, authority.account_jwts().values())


async def _durables(authority: Authority, *, make: Sequence[IssuedKey] = (), remove: Sequence[str | None] = ()) -> None:
    """Make and remove consumers of keys; nothing for keys without one."""
    made, removed = [key for key in make if key.durable], [name for name in remove if name]
    if made or removed:
        async with _as(authority.temporary(PROVISION)) as bus:
            for name in removed:
                await remove_durable(bus.requests, name)
            for key in made:
                await make_durable(bus.requests, key.durable or "", key.filter)


@contextlib.asynccontextmanager
async def _as(credential: Credential) -> AsyncIterator[Bus]:
    """A bus with a key that was signed for this, at the broker of the environment. Raises CommandError."""
    with explained(SettingsError, exit_code=MISUSED):
        settings = read(BusSettings, "nats", os.environ)
    with tempfile.TemporaryDirectory(prefix="dynamix-keys-") as folder:
        file = Path(folder, "keys.creds")
        _write(file, credential)
        ours = msgspec.structs.replace(settings, user="", password="", password_file="", creds_file=str(file))
        async with connected(ours, "keys", timeout_s=BROKER_TIMEOUT_S, wait=False) as bus:
            yield bus


def _say(text: str) -> None:
    print(text, file=sys.stderr)
