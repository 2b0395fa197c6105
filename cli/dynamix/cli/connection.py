"""Connection of commands to the broker: DYNAMIX_NATS_... if set, else `dynamix up`'s, else the default.

`dynamix up` leaves a file with the broker's address and generated password, readable by its user only, in
XDG_RUNTIME_DIR (or ~/.cache/dynamix), and removes it when it ends. It holds a lock on the file: a file that nobody has
locked is left over.
"""

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.runtime.settings import BusSettings, SettingsError, names_broker, read, redact_url

from .errors import MISUSED, CommandError, explained

CONNECT_TIMEOUT_S = 10.0
HOW_TO_START = "start one with `dynamix up`, or set DYNAMIX_NATS_URL"
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NoBrokerError(CommandError):
    """There is no broker at the address, or it does not answer."""


def find(environ: Mapping[str, str]) -> BusSettings:
    """Settings of the connection to the broker.

    Raises CommandError when a variable is misspelt or has a wrong value, or the file is not safe to use.
    """
    if names_broker(environ):
        with explained(SettingsError, exit_code=MISUSED):
            return read(BusSettings, "nats", environ)
    found = running(environ)
    return found[0] if found else BusSettings()


def running(environ: Mapping[str, str]) -> tuple[BusSettings, int] | None:
    """How to reach the broker of the running `dynamix up`, and its process id; `None` when none runs.

    Raises CommandError when others may read or could have written the file.
    """
    file = path(environ)
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.getuid() or status.st_mode & _OPEN_TO_OTHERS:
                what = "holds a password and is open to other users: remove it, or set DYNAMIX_NATS_URL"
                raise CommandError(f"{file} {what}")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            return msgspec.json.decode(opened.read(), type=tuple[BusSettings, int])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{file} cannot be read ({error}): remove it") from error
    except PermissionError as error:
        raise CommandError(f"{file} may not be read by this user: set HOME to yours, or DYNAMIX_NATS_URL") from error


@contextlib.asynccontextmanager
async def connected(
    settings: BusSettings, name: str, *, timeout_s: float = CONNECT_TIMEOUT_S, wait: bool = True
) -> AsyncIterator[Bus]:
    """A bus for the command `name`, closed at the end; the broker sees `<name>-<pid>`.

    The broker has `timeout_s` to answer; with `wait` it may also start only then.

    Raises:
        NoBrokerError: when the broker cannot be reached.
        CommandError: when it refuses the user, or an error of the bus leaves the context.
    """
    try:
        async with asyncio.timeout(timeout_s):
            bus = await Bus.connect(settings, name=f"{name}-{os.getpid()}", wait=wait)
    except TimeoutError:
        where = redact_url(settings.url)
        raise NoBrokerError(f"no broker at {where} after {timeout_s:g} s: {HOW_TO_START}") from None
    except (PermissionDeniedError, ValueError) as error:
        raise CommandError(str(error)) from error
    except (BusError, OSError) as error:
        raise NoBrokerError(str(error)) from error
    try:
        yield bus
    except BusError as error:
        raise CommandError(str(error)) from error
    finally:
        await bus.close()


@contextlib.contextmanager
def published(settings: BusSettings, environ: Mapping[str, str]) -> Iterator[Path]:
    """Leave the file for other commands for as long as the context lasts."""
    file = path(environ)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output_files.write(file, msgspec.json.encode((settings, os.getpid())), mode=0o600)
    with file.open("rb") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(ours.fileno()), file.stat()):  # not that of a later one
                    file.unlink()


def path(environ: Mapping[str, str]) -> Path:
    """Path of this user's file."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "dynamix" / "connection.json"
    return Path(environ.get("HOME") or Path.home()) / ".cache" / "dynamix" / "connection.json"
