"""Create, revoke and list the broker's keys, each for jobs of certain names, a node or an instance.

  dynamix keys init --credentials /etc/dynamix/credentials --node node-a   # once, before the broker's first start
  dynamix keys create alice --role trainer --job mnist --job resnet        # all runs of jobs of these names
  dynamix keys create node-b --role collector --node node-b
  dynamix keys create alice --role trainer --job mnist -o new.creds        # a second key; both work until:
  dynamix keys revoke alice --old
  dynamix keys revoke alice
  dynamix keys refresh                  # after an upgrade, or when the broker could not be reached

`init` makes the authority, a file that holds all secrets, and the accounts.conf that nats.conf includes. A key is a
file of mode 0600 for DYNAMIX_NATS_CREDS_FILE; it works at once, without a reload. Revocations and consumers are sent to
the broker at DYNAMIX_NATS_URL.
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

from dynamix.cli.arguments import add_action, add_json_argument, add_list, add_option, add_output_argument
from dynamix.cli.connection import connected
from dynamix.cli.errors import MISUSED, CommandError, explained, reading
from dynamix.cli.output import write_result, writing
from dynamix.cli.terminal import in_columns
from dynamix.runtime import output_files
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.authority import LIMITED_BY, PROVISION, ROLES, SYSTEM_ACCOUNT, Authority, IssuedKey
from dynamix.runtime.bus.provision import push_accounts
from dynamix.runtime.bus.read import make_durable, remove_durable
from dynamix.runtime.credentials import Credential
from dynamix.runtime.output_files import FileKind
from dynamix.runtime.settings import BusSettings, SettingsError, SharedSettings, node_name, read

AUTHORITY = Path("/etc/dynamix/authority/authority.json")
CREDENTIALS = Path("/etc/dynamix/credentials")
CREDENTIAL = FileKind("a credential of `dynamix keys`", lambda head: head.startswith(b"-----BEGIN NATS USER JWT"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, act: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        one = add_action(actions, name, act, what)
        add_option(one, "--authority", AUTHORITY, "the file of the authority", metavar="FILE", type=Path)
        return one

    starting = add("init", _init, "Make the authority, accounts.conf, and the credentials of this machine's services.")
    add_option(starting, "--credentials", CREDENTIALS, "the folder for the files NAME.creds", metavar="DIR", type=Path)
    add_list(
        starting, "--node", "NODE", "a node that gets a collector's credential; may be repeated (default: this one)"
    )
    add_option(starting, "--instance", "1", "the instance of the reward service")
    creating = add("create", _create, "Issue a key, and write it.")
    creating.add_argument("name", metavar="NAME", help="the user of the key")
    creating.add_argument("--role", choices=ROLES, required=True, help="the user's role")
    add_list(creating, "--job", "NAME", "name of jobs that a trainer may run; may be repeated")
    add_list(creating, "--node", "NODE", "the node of a collector")
    add_list(creating, "--instance", "NAME", "DYNAMIX_INSTANCE of a reward service (if unset, its node)")
    add_output_argument(creating, CREDENTIAL, "where to write the key, with mode 0600 (default: NAME.creds here)")
    for one in (starting, creating):
        add_option(one, "--days", 365, "days for which the key is valid", metavar="N")
    revoking = add("revoke", _revoke, "Revoke a user's keys, and end their connections.")
    revoking.add_argument("name", metavar="NAME", help="the user of the keys")
    revoking.add_argument("--old", action="store_true", help="revoke all but the user's newest key")
    add_json_argument(add("list", _list, "List the keys with their purpose and expiry."))
    add("refresh", _refresh, "Send the broker the permissions of this version, all revocations, and missing consumers.")


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    if arguments.act is not _init and not arguments.authority.exists():
        fix = "name it with --authority, or make one with `dynamix keys init`"
        raise CommandError(f"there is no authority at {arguments.authority}: {fix}")
    with explained(ValueError, exit_code=MISUSED):
        arguments.act(arguments)
    return 0


def _init(arguments: argparse.Namespace) -> None:
    path, folder = arguments.authority, arguments.credentials
    if path.exists():
        raise CommandError(f"{path} exists: `dynamix keys create` adds keys to it, and nothing replaces it")
    nodes = arguments.node or [node_name(read(SharedSettings, "", os.environ))]
    users: list[tuple[str, str, list[str]]] = [("reward", "reward", [arguments.instance])]
    users += [(role, role, []) for role in ROLES if role not in LIMITED_BY]
    users += [(f"collector-{node}", "collector", [node]) for node in nodes]
    authority = Authority.new()
    issued = [authority.issue(*user, days=arguments.days) for user in users]
    with writing(path):
        for each in (path.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        for credential in issued:
            _write(folder / f"{credential.name}.creds", credential)
        authority.write(path)
    names = ", ".join(f"{credential.name}.creds" for credential in issued)
    _say(f"{path} is the authority: keep a copy in a safe place; {folder} has {names}")
    _say("start the broker; then run `dynamix provision` with provision.creds, and `dynamix keys refresh`")


def _create(arguments: argparse.Namespace) -> None:
    file = Path(arguments.output or f"{arguments.name}.creds")
    for role, option in LIMITED_BY.items():
        if getattr(arguments, option) and role != arguments.role:
            raise ValueError(f"--{option} is not for a {arguments.role}'s key: leave it out")
    if file.exists():
        raise CommandError(f"{file} exists: name another file with -o, or remove this one")
    limits = [*arguments.job, *arguments.node, *arguments.instance]
    with _changing(arguments.authority) as authority:
        credential = authority.issue(arguments.name, arguments.role, limits, days=arguments.days)
    with writing(file):  # last: a key that is not in the list could not be revoked
        _write(file, credential)
    until = dt.datetime.fromtimestamp(credential.expires_s or 0, dt.UTC)
    _say(f"{file} is a key of {arguments.name} until {until:%Y-%m-%d}: name it in DYNAMIX_NATS_CREDS_FILE")
    if authority.keys[-1].durable:
        try:
            asyncio.run(_tell(authority, make=authority.keys[-1:]))
        except CommandError as error:
            _say(f"the consumer that it reads by is missing: run `dynamix keys refresh` later ({error})")


def _revoke(arguments: argparse.Namespace) -> None:
    with _changing(arguments.authority) as authority:
        revoked = authority.revoke(arguments.name, only_old=arguments.old)
    _say(f"revoked {len(revoked)} key(s) of {arguments.name}")
    kept = {key.durable for key in authority.keys if key.is_valid}
    asyncio.run(_tell(authority, accounts=True, remove=[key for key in revoked if key.durable not in kept]))


def _refresh(arguments: argparse.Namespace) -> None:
    with _changing(arguments.authority) as authority:
        pass  # writing it signs the accounts again
    asyncio.run(_tell(authority, accounts=True, make=[key for key in authority.keys if key.is_valid]))
    _say("the broker has the permissions of this version")


def _list(arguments: argparse.Namespace) -> None:
    with reading(arguments.authority):
        keys = Authority.read(arguments.authority).keys
    headings, rows = ("name", "role", "for", "works until", "public key"), []
    for key in keys:
        until = "revoked" if key.revoked else f"{dt.datetime.fromtimestamp(key.expires, dt.UTC):%Y-%m-%d}"
        rows.append((key.name, key.role, ", ".join(key.tags) or "all", until, key.public))
    write_result({"keys": keys}, in_columns(headings, rows, left=headings), arguments.json)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[Authority]:
    """The authority, to change; written when the block ends without an error. No other process changes it meanwhile."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        with reading(path):
            authority = Authority.read(path)
        yield authority
        with writing(path):
            authority.write(path)
    finally:
        os.close(directory)


def _write(file: Path, credential: Credential) -> None:
    output_files.write(file, credential.text().encode(), mode=0o600)


async def _tell(
    authority: Authority, *, accounts: bool = False, make: Sequence[IssuedKey] = (), remove: Sequence[IssuedKey] = ()
) -> None:
    """Give the broker the accounts, and make and remove the consumers of these keys, most of which have none."""
    if accounts:
        try:
            async with _as(authority.temporary(SYSTEM_ACCOUNT)) as bus:
                await push_accounts(bus, authority.account_jwts().values())
        except CommandError as error:
            what = "but the broker does not know it yet: restart it, or run `dynamix keys refresh` once it answers"
            raise CommandError(f"it is written, {what} ({error})") from error
    made, removed = ([key.durable for key in keys if key.durable] for keys in (make, remove))
    if made or removed:
        async with _as(authority.temporary(PROVISION)) as bus:
            for stream, name, _ in removed:
                await remove_durable(bus.requests, stream, name)
            for durable in made:
                await make_durable(bus.requests, *durable)


@contextlib.asynccontextmanager
async def _as(credential: Credential) -> AsyncIterator[Bus]:
    """A bus with a key that was signed for this, at the broker of the environment. Raises CommandError."""
    with explained(SettingsError, exit_code=MISUSED):
        settings = read(BusSettings, "nats", os.environ)
    with tempfile.TemporaryDirectory(prefix="dynamix-keys-") as folder:
        file = Path(folder, "keys.creds")
        _write(file, credential)
        ours = msgspec.structs.replace(settings, user="", password="", password_file="", creds_file=str(file))
        async with connected(ours, "keys", wait=False) as bus:
            yield bus


def _say(text: str) -> None:
    print(text, file=sys.stderr)
