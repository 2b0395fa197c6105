"""The page of `dynamix dashboard`: jobs and captures as JSON, and a web server that shows them; it only reads.

`documents` is pure: change there what is shown. `access` decides who may read. `server` is the shell: routes, events,
uvicorn. `page/` is what a browser runs: HTML, CSS, ES modules, and uPlot with its licence in `page/vendor/`.
"""

import ipaddress
import secrets
from pathlib import Path

import msgspec

from dynamix.runtime.input_files import read_regular
from dynamix.runtime.settings import MAX_PORT

DEFAULT_PORT = 8650
MIN_TOKEN_CHARACTERS = 16


class DashboardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `dynamix dashboard`: `DYNAMIX_DASHBOARD_<FIELD>` or `--field`."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback every request needs the token."""
    port: int = DEFAULT_PORT
    """TCP port; 0 takes a free one."""
    token: str = ""
    """Token for readers, at least 16 characters; better given as a file."""
    token_file: str = ""
    """A file that holds the token."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid port, and for two tokens."""
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port must be 0 (a free one) to {MAX_PORT}, not {self.port}")
        if self.token and self.token_file:
            raise ValueError("token and token_file are both set: choose one")

    def __repr__(self) -> str:
        return f"DashboardSettings(host={self.host!r}, port={self.port}, token=***)"


def token_of(settings: DashboardSettings) -> str:
    """The token that readers need: the one that was set, beyond loopback else a new one; empty: none is needed.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when the token is too short.
    """
    file = settings.token_file
    token = read_regular(Path(file)).decode(errors="replace").strip() if file else settings.token
    if not token and not file:
        return "" if is_loopback(settings.host) else secrets.token_urlsafe(24)
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        where = file or "DYNAMIX_DASHBOARD_TOKEN"
        raise ValueError(f"{where}: a token needs at least {MIN_TOKEN_CHARACTERS} printable ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Whether an address or host name is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
