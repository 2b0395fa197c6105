"""How commands find the broker: DYNAMIX_NATS_... if set, else the one that `dynamix up` started, else the default.

`dynamix up` leaves a file with the broker's address and generated password, readable by its user only, in
XDG_RUNTIME_DIR (or ~/.cache/dynamix), and removes it when it ends.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.settings import BusSettings, SettingsError, read

from .errors import CommandError

PREFIX = "DYNAMIX_NATS_"
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class ConnectionFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    url: str
    user: str
    password: str
    pid: int
    """The `dynamix up` that wrote it; without that process the file means nothing."""


def find(environ: Mapping[str, str]) -> BusSettings:
    """How to reach the broker.

    Raises:
        CommandError: when a variable is misspelt or has a wrong value, or the file is not safe to use.
    """
    if any(key.startswith(PREFIX) and value for key, value in environ.items()):
        try:
            return read(BusSettings, "nats", environ)
        except SettingsError as error:
            raise CommandError(str(error), exit_code=2) from error
    found = running(environ)
    return BusSettings(url=found.url, user=found.user, password=found.password) if found else BusSettings()


def running(environ: Mapping[str, str]) -> ConnectionFile | None:
    """What the `dynamix up` that runs now has left; `None` when none runs.

    Raises:
        CommandError: when others may read or could have written the file.
    """
    file = path(environ)
    try:
        with file.open("rb") as opened:
            _check_owner(file, os.fstat(opened.fileno()))
            found = msgspec.json.decode(opened.read(), type=ConnectionFile)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CommandError(f"{file} cannot be read ({error}): remove it") from error
    except PermissionError as error:
        raise CommandError(f"{file} may not be read by this user: set HOME to yours, or DYNAMIX_NATS_URL") from error
    return found if _is_alive(found.pid) else None


@contextlib.contextmanager
def published(settings: BusSettings, environ: Mapping[str, str]) -> Iterator[Path]:
    """Leave the file for other commands for as long as the context lasts."""
    file = path(environ)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = ConnectionFile(url=settings.url, user=settings.user, password=settings.password, pid=os.getpid())
    output_files.write(file, msgspec.json.encode(content), mode=0o600, streams=False)
    try:
        yield file
    finally:
        with contextlib.suppress(CommandError):
            if (left := running(environ)) is not None and left.pid == os.getpid():
                file.unlink(missing_ok=True)


def path(environ: Mapping[str, str]) -> Path:
    """Where the file of this user is."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "dynamix" / "connection.json"
    return Path(environ.get("HOME") or Path.home()) / ".cache" / "dynamix" / "connection.json"


def _check_owner(file: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid() or status.st_mode & _OPEN_TO_OTHERS:
        raise CommandError(f"{file} holds a password and is open to other users: remove it, or set DYNAMIX_NATS_URL")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
