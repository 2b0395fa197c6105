"""Settings: frozen structs filled from defaults, then the environment, then `--flags`; a misspelt key is an error."""

import ast
import contextlib
import hashlib
import inspect
import ipaddress
import math
import os
import re
import socket
import ssl
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from dynamix.runtime.credentials import Credential, read_credential
from dynamix.runtime.input_files import check_regular, read_secret
from dynamix.schemas.spelling import choices, suggestion
from dynamix.schemas.subjects import check_token

PREFIX = "DYNAMIX_"
BUS_PREFIX = "DYNAMIX_NATS_"
COMPONENTS = ("nats", "collector", "reward", "arbitrator", "learner", "trainer", "up", "demo", "dashboard")
"""Owners of `DYNAMIX_<COMPONENT>_<FIELD>`; each reads its own and leaves the others' alone."""

MAX_PORT = 65535

S = TypeVar("S", bound=msgspec.Struct)


class SettingsError(ValueError):
    """A setting that cannot be used; the message names its key, its value and what was expected."""


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the connection to the broker: `DYNAMIX_NATS_...`."""

    url: str = "nats://127.0.0.1:4222"
    """Address of the broker; several, separated by commas, for a cluster. `tls://` demands TLS.

    A training process without any `DYNAMIX_NATS_...` uses no broker.
    """
    user: str = ""
    """The broker's user. Beyond loopback a user is required."""
    password: str = ""
    """The user's password; better given as a file."""
    password_file: str = ""
    """A file that holds the password; read again at every connection, so that it can be rotated."""
    creds_file: str = ""
    """A credential of `dynamix keys`, in place of user and password; read again at every connection."""
    ca_file: str = ""
    """Certificates (PEM) that the broker's certificate is checked against; demands TLS."""
    certificate_file: str = ""
    """Client certificate (PEM), for a broker that requires one; demands TLS."""
    certificate_key_file: str = ""
    """Its private key (PEM), where the certificate's file does not hold it."""

    @property
    def demands_tls(self) -> bool:
        """Whether unencrypted connections are refused."""
        return bool(self.ca_file or self.certificate_file) or self.url.startswith("tls://")

    def __repr__(self) -> str:
        return f"BusSettings(url={redact_url(self.url)!r}, user={self.user!r}, password=***)"


class SharedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all components: `DYNAMIX_...` without a component."""

    node: str = ""
    """This machine's name on the bus; collector and ranks of one machine must agree. Default: from the host name."""
    instance: str = ""
    """Tells two processes of one service apart. Default: the node's name."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error."""
    job: str = ""
    """The job that a training process belongs to; `dynamix train` sets it."""
    stuck_after_s: float = 20.0
    """A service whose event loop is blocked for so many seconds ends with code 1, to be started again; 0: never."""
    metrics_port: int = 0
    """Port on which a service answers /metrics, /livez and /readyz; 0: none. Training processes open none."""
    metrics_host: str = "127.0.0.1"
    """Address of that port. It has no password: beyond loopback only in a network that you trust."""

    def __post_init__(self) -> None:
        if self.stuck_after_s != 0 and not 1 <= self.stuck_after_s < math.inf:
            raise ValueError(f"stuck_after_s must be 0 (never) or at least 1 second, not {self.stuck_after_s:g}")
        if not 0 <= self.metrics_port <= MAX_PORT:
            raise ValueError(f"metrics_port must be 0 (none) to {MAX_PORT}, not {self.metrics_port}")
        for token in (self.node, self.instance, self.job):
            if token:
                check_token(token)


def read_supervisor(environ: Mapping[str, str]) -> tuple[str, float]:
    """Systemd's requests to this process: sd_notify(3) and sd_watchdog_enabled(3).

    The datagram socket that receives notifications, a path or `@name` of an abstract one, empty for none; and the
    seconds within which the process must notify that it is alive, 0 where it need not. A watchdog for another process,
    such as its parent, does not count.

    Raises:
        ValueError: for a socket of another family, and for what is not a number of microseconds.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if address and not address.startswith(("/", "@")):
        raise ValueError(f"NOTIFY_SOCKET={address!r}: only a path or @name can be notified; unset it")
    usec = environ.get("WATCHDOG_USEC", "")
    if not address or not usec or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return address, 0.0
    if not usec.isdecimal():
        raise ValueError(f"WATCHDOG_USEC={usec!r} is not a number of microseconds")
    return address, int(usec) / 1e6


class Loaded(NamedTuple, Generic[S]):
    """All settings of one process."""

    shared: SharedSettings
    bus: BusSettings
    own: S
    supervisor: tuple[str, float] = "", 0.0


def read(struct: type[S], component: str, environ: Mapping[str, str], flags: Mapping[str, str] = {}) -> S:
    """Settings of one component: defaults, overruled by `environ`, overruled by `flags` (texts by name of field).

    An empty variable counts as not set. `component` is one of `COMPONENTS`, or "" for what all components share.

    Raises:
        SettingsError: for an unknown variable (naming the nearest known one) and for a value that does not fit.
    """
    prefix = _prefix(component)
    known = {PREFIX + name.upper() for name in SharedSettings.__struct_fields__}
    known |= {prefix + name.upper() for name in struct.__struct_fields__}
    others = tuple(_prefix(name) for name in COMPONENTS if name != component)
    for key in sorted(environ):
        if key.startswith(PREFIX) and key not in known and not key.startswith(others):
            raise SettingsError(f"unknown setting {key}{suggestion(key, known)}")
    values = {}
    for field in msgspec.structs.fields(struct):
        key = prefix + field.name.upper()
        text = environ.get(key) or None
        if field.name in flags:
            key, text = _flag(field.name), flags[field.name]
        if text is None:
            continue
        is_list = isinstance(field.default, tuple)
        parts: Any = [part.strip() for part in text.split(",") if part.strip()] if is_list else text
        try:
            values[field.name] = msgspec.convert(parts, field.type, strict=False)
        except msgspec.ValidationError as error:
            is_secret = any(word in key.upper() for word in ("PASSWORD", "TOKEN"))
            fault = choices(field.type) or error
            raise SettingsError(f"{key}={'***' if is_secret else repr(text)}: {fault}") from error
    try:
        return struct(**values)
    except ValueError as error:
        raise SettingsError(f"{component or 'shared'} settings: {error}") from error


def names_broker(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a broker: one setting of the bus is enough, the others have defaults."""
    return any(key.startswith(BUS_PREFIX) and value for key, value in environ.items())


def load(component: str, struct: type[S], arguments: Sequence[str]) -> Loaded[S]:
    """Settings of this process, from its environment and arguments (`--flag value`, `--flag=value`, `--flag`: true).

    Beside the component's own flags it knows those of `SharedSettings` and, with the prefix `--nats-`, those of
    `BusSettings` except the password, which any user of the machine could read in the list of processes.

    Raises:
        SettingsError: as `read`, and for an unknown argument.
    """
    owners = ((BusSettings, "--nats-"), (SharedSettings, "--"), (struct, "--"))
    known = {_flag(name, dashes): (owner, name) for owner, dashes in owners for name in owner.__struct_fields__}
    del known["--nats-password"]
    given: dict[type, dict[str, str]] = {owner: {} for owner, _ in owners}
    rest = list(arguments)
    while rest:
        flag, separator, value = rest.pop(0).partition("=")
        if flag not in known:
            raise SettingsError(f"unknown argument {flag!r}{suggestion(flag, known)}")
        if not separator:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        owner, name = known[flag]
        given[owner][name] = value
    own = read(struct, component, os.environ, given[struct])  # first: it knows the nearest key best
    return Loaded(
        shared=read(SharedSettings, "", os.environ, given[SharedSettings]),
        bus=read(BusSettings, "nats", os.environ, given[BusSettings]),
        own=own,
        supervisor=read_supervisor(os.environ),
    )


def node_name(shared: SharedSettings) -> str:
    """This machine's name on the bus: `DYNAMIX_NODE`, else the host name in allowed characters and a short hash of it.

    The same on every call and in every process of one host name, so that collector and ranks agree. Containers have
    host names of their own: set `DYNAMIX_NODE` there.
    """
    if shared.node:
        return check_token(shared.node)
    host = socket.gethostname()
    short = re.sub(r"[^a-z0-9]+", "-", host.partition(".")[0].lower()).strip("-")[:48] or "node"
    return f"{short}-{hashlib.sha256(host.encode()).hexdigest()[:6]}"


def help_text(component: str, struct: type[msgspec.Struct]) -> str:
    """The text of `--help`: flag, variable, default and meaning (the docstring beneath the field) of each setting."""
    lines = [f"usage: python -m dynamix.{component} [--flag value ...]", ""]
    owners = ((struct, component, "--"), (SharedSettings, "", "--"), (BusSettings, "nats", "--nats-"))
    for owner, owned_by, dashes in owners:
        for name, variable, default, meaning in describe(owner, owned_by):
            is_secret = owner is BusSettings and name == "password"
            flag = "(no flag)" if is_secret else _flag(name, dashes)
            lines.append(f"  {flag:<32} {variable}, default {default or '(empty)'}")
            lines += textwrap.wrap(meaning, width=100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def describe(struct: type[msgspec.Struct], component: str) -> Iterator[tuple[str, str, str, str]]:
    """The settings of one of `COMPONENTS`, or those that all share for "".

    Of each its name, the variable, the text that would give the default, and the docstring beneath the field, which is
    empty where there is no source.
    """
    meanings: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        with contextlib.suppress(OSError, TypeError):
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
            assert isinstance(body, ast.ClassDef)
            for statements in pairwise(body.body):
                match statements:
                    case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                        meanings[name] = " ".join(text.split())
    for field in msgspec.structs.fields(struct):
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        variable = _prefix(component) + field.name.upper()
        yield field.name, variable, default, meanings.get(field.name, "")


def password_of(settings: BusSettings) -> str:
    """The current password: the file's if one is named, read now. Raises OSError when the file cannot be read."""
    if not settings.password_file:
        return settings.password
    return read_secret(Path(settings.password_file)).decode(errors="replace").strip()


def credential_in(settings: BusSettings) -> Credential | None:
    """The current credential, read now; `None` without one.

    Raises:
        ValueError: when the file cannot be read, or is none; the message names it.
    """
    if not settings.creds_file:
        return None
    try:
        return read_credential(Path(settings.creds_file))
    except ModuleNotFoundError as error:  # a training process without the services' packages
        what = f"DYNAMIX_NATS_CREDS_FILE={settings.creds_file!r} needs the package {error.name}"
        raise ValueError(f"{what}: pip install 'dynamix-batch[services]'") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"DYNAMIX_NATS_CREDS_FILE={settings.creds_file!r} cannot be used: {reason}"
        raise ValueError(f"{what}; name a credential of `dynamix keys`") from error


def tls_context(settings: BusSettings) -> ssl.SSLContext | None:
    """The TLS context: the authority of the broker's certificate, and our own; `None` where no file is named.

    Raises:
        ValueError: when a file cannot be used; the message names it.
    """
    authority, certificate, key = settings.ca_file, settings.certificate_file, settings.certificate_key_file
    if key and not certificate:
        raise ValueError("DYNAMIX_NATS_CERTIFICATE_KEY_FILE needs DYNAMIX_NATS_CERTIFICATE_FILE: set both, or neither")
    if not (authority or certificate):
        return None
    named, wrong = f"DYNAMIX_NATS_CA_FILE={authority!r}", "it holds no certificates"
    fix = "name a file of certificates (PEM)"
    try:
        if authority:
            check_regular(Path(authority))
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            named = f"DYNAMIX_NATS_CERTIFICATE_FILE={certificate!r} and DYNAMIX_NATS_CERTIFICATE_KEY_FILE={key!r}"
            wrong, fix = "they do not fit", "name a certificate and its key (PEM, without a pass phrase)"
            for file in filter(None, (certificate, key)):
                check_regular(Path(file))
            context.load_cert_chain(certificate, key or None, password=str)  # else OpenSSL would ask the terminal
    except OSError as error:
        reason = wrong if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"{named} cannot be used: {reason}; {fix}") from error
    return context


def check_bus(settings: BusSettings) -> None:
    """Refuse what cannot work, before anything connects: URL, TLS, credential and password.

    Raises:
        ValueError: naming the setting, its value and the fix.
    """
    check_url(settings)
    tls_context(settings)
    if credential_in(settings) is not None and (settings.password or settings.password_file):
        raise ValueError("DYNAMIX_NATS_CREDS_FILE and a password are set: unset one of them, only one can be used")
    try:
        password_of(settings)
    except OSError as error:
        what = f"DYNAMIX_NATS_PASSWORD_FILE={settings.password_file!r} cannot be read: {error.strerror}"
        raise ValueError(f"{what}; name a file that holds the password") from error


def check_url(settings: BusSettings) -> None:
    """Refuse what is no URL, and a broker beyond loopback without credentials. Raises ValueError, naming the host."""
    for url in map(str.strip, settings.url.split(",")):
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        try:
            is_url = bool(parts.hostname) and parts.port != 0 and ("://" in url or re.search(r"[.:]|^localhost$", url))
        except ValueError:  # the port is not a number, or out of range
            is_url = False
        if not is_url:
            raise ValueError(f"DYNAMIX_NATS_URL: {redact_url(url)!r} is no URL: write nats://host:port")
        if parts.scheme not in {"nats", "tls"}:
            raise ValueError(f"{redact_url(url)}: the bus speaks nats:// and tls:// only")
        host, has_credentials = parts.hostname or "", bool(settings.user or settings.creds_file or parts.username)
        if not has_credentials and not is_loopback(host):
            raise ValueError(
                f"{redact_url(url)} is not this machine: set DYNAMIX_NATS_CREDS_FILE, or DYNAMIX_NATS_USER and "
                "DYNAMIX_NATS_PASSWORD_FILE (beyond loopback the bus is never used without credentials)"
            )


def is_loopback(host: str) -> bool:
    """Whether an address or host name is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def redact_url(text: str) -> str:
    """The text with every password or token in front of an `@` of a URL replaced by `***`."""
    return re.sub(r"(\w+://)([^@/\s:]*)(:[^@\s]*)?@", lambda m: f"{m[1]}{m[2] if m[3] else '***'}:***@", text)


def _prefix(component: str) -> str:
    return f"{PREFIX}{component.upper()}_" if component else PREFIX


def _flag(name: str, dashes: str = "--") -> str:
    return dashes + name.replace("_", "-")
