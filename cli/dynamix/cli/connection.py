"""How commands find the broker and connect to it: DYNAMIX_NATS_... if set, else `dynamix up`'s, else the default.

`dynamix up` leaves a file with the broker's address and generated password, readable by its user only, in
XDG_RUNTIME_DIR (or ~/.cache/dynamix), and removes it when it ends.
"""

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.runtime.settings import BusSettings, SettingsError, read, redact_url

from .errors import MISUSED, CommandError, explained

CONNECT_TIMEOUT_S = 10.0
HOW_TO_START = "start one with `dynamix up`, or set DYNAMIX_NATS_URL"
PREFIX = "DYNAMIX_NATS_"
CLOCK_OFF_S = 2.0
"""The clock may have been set since the boot, and files have coarser times."""
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NoBrokerError(CommandError):
    """There is no broker at the address, or it does not answer."""


class ConnectionFile(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file."""

    url: str
    user: str
    password: str
    pid: int
    """The `dynamix up` that wrote it; without that process the file means nothing."""

    @property
    def settings(self) -> BusSettings:
        """How to reach the broker."""
        return BusSettings(url=self.url, user=self.user, password=self.password)


def find(environ: Mapping[str, str]) -> BusSettings:
    """How to reach the broker.

    Raises CommandError when a variable is misspelt or has a wrong value, or the file is not safe to use.
    """
    if is_configured(environ):
        with explained(SettingsError, exit_code=MISUSED):
            return read(BusSettings, "nats", environ)
    found = running(environ)
    return found.settings if found else BusSettings()


def is_configured(environ: Mapping[str, str]) -> bool:
    """Whether the environment says how to reach the broker."""
    return any(key.startswith(PREFIX) and value for key, value in environ.items())


def running(environ: Mapping[str, str]) -> ConnectionFile | None:
    """The connection file of the running `dynamix up`; `None` when none runs.

    Raises CommandError when others may read or could have written the file.
    """
    file = path(environ)
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.getuid() or status.st_mode & _OPEN_TO_OTHERS:
                what = "holds a password and is open to other users: remove it, or set DYNAMIX_NATS_URL"
                raise CommandError(f"{file} {what}")
            found = msgspec.json.decode(opened.read(), type=ConnectionFile)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{file} cannot be read ({error}): remove it") from error
    except PermissionError as error:
        raise CommandError(f"{file} may not be read by this user: set HOME to yours, or DYNAMIX_NATS_URL") from error
    return found if _ran_at(found.pid, status.st_mtime) else None


def _ran_at(pid: int, time_s: float) -> bool:
    """Whether a process of ours runs that ran by then: one that has begun since only has the same number."""
    try:
        process = Path(f"/proc/{pid}").stat()
        began = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
        booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError:
        return False
    return process.st_uid == os.getuid() and booted_s + int(began) / os.sysconf("SC_CLK_TCK") <= time_s + CLOCK_OFF_S


@contextlib.asynccontextmanager
async def connected(
    settings: BusSettings, name: str, *, timeout_s: float | None = None, wait: bool = True
) -> AsyncIterator[Bus]:
    """A bus for the command `name`, closed at the end; the broker sees `<name>-<pid>`.

    The broker has `timeout_s` (10) to answer; with `wait` it may also start only then.

    Raises:
        NoBrokerError: when the broker cannot be reached.
        CommandError: when it refuses the user, or an error of the bus leaves the context.
    """
    timeout_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
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
    content = ConnectionFile(url=settings.url, user=settings.user, password=settings.password, pid=os.getpid())
    output_files.write(file, msgspec.json.encode(content), mode=0o600)
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
