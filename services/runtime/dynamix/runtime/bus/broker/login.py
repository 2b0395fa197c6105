"""Who we are to the broker: a user with a password, or a key; and what says that it refuses us."""

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import nats.errors

from dynamix.runtime.settings import BusSettings, key_of, password_of, redact_url

if TYPE_CHECKING:
    from .nkeys import UserKey

Sign = Callable[[str], bytes]

SIGNATURE_BYTES = 8
"""In a message's identity."""

API = "$JS.API."
"""Prefix of requests to JetStream."""
OUTSIDE_API = "dynamix.api."
"""What stands for it in an account without streams, where the server itself answers `$JS.API.>`: it has none."""


class Login:
    """The user of one connection. Files are read for each attempt to connect, so that what they hold can be rotated.

    Attributes:
        user: its name; empty without one.
        inbox: prefix of every subject that this connection listens to for replies: `_INBOX.<user>.<name>.<random>`.
            The user comes first because the broker's permissions are per user, and a wildcard is a whole token. With a
            key its file says what stands for the user.
        api: prefix of requests to JetStream: the server's own, or what the key's file says.
        consumer: what the key's file says that names of durable consumers end with.
        has_key: whether a key signs the broker's challenge, in place of a password.
    """

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Raises ValueError, naming the file, for a key that cannot be used: now, and not when one waits for it."""
        self._settings = settings
        key = key_of(settings)
        self.has_key = key is not None
        self.user = settings.user or (key.name if key else "") or unquote(urlsplit(settings.url).username or "")
        owner = key.inbox.split(".") if key and key.inbox else [self.user]
        self.inbox = ".".join(("_INBOX", *(_token(part) for part in (*owner, name) if part), secrets.token_hex(4)))
        self.api = key.api if key and key.api else API
        self.consumer = key.consumer if key else ""
        self._secret = key.seed.encode() if key else b""
        if self.has_key:
            self._key()

    def sign_id(self, message_id: str) -> str:
        """What only this user can know of a message's identity: the same after a restart, and in all its processes."""
        if not self._secret:
            with contextlib.suppress(OSError):  # a file that is gone now: after a restart identities are others
                self._secret = self.password().encode()
            self._secret = self._secret or secrets.token_bytes(32)
        return hmac.digest(self._secret, message_id.encode(), hashlib.sha256)[:SIGNATURE_BYTES].hex()

    def password(self) -> str:
        """The user's password."""
        return password_of(self._settings) or unquote(urlsplit(self._settings.url).password or "")

    def challenge(self) -> tuple[str, Sign]:
        """The public key, and what signs with the secret one; raises nats-py's error where the file is broken."""
        try:
            key = self._key()
        except ValueError as error:
            raise nats.errors.Error(f"nats: {error}") from error
        return key.public, key.sign

    def refusal(self) -> str:
        """What to say where the broker refuses us."""
        check = "check DYNAMIX_NATS_USER and DYNAMIX_NATS_PASSWORD_FILE; `dynamix keys revoke` may have ended this user"
        if self.has_key:
            unknown = "the broker may not have read its users again since it was made (systemctl reload dynamix-nats)"
            check = f"the key in {self._settings.nkey_file} may be revoked, or {unknown}"
        elif not self.password():
            check = "there is no password: set DYNAMIX_NATS_PASSWORD_FILE, or DYNAMIX_NATS_NKEY_FILE instead"
        return f"{redact_url(self._settings.url)} refuses user {self.user!r}: {check}"

    def _key(self) -> "UserKey":
        """The key in the file. Raises ValueError, naming the file."""
        from .nkeys import UserKey  # noqa: PLC0415 - libsodium, only where there is a key

        credential = key_of(self._settings)
        assert credential is not None, "asked with a key only"
        try:
            return UserKey(credential.seed)
        except ValueError as error:
            raise ValueError(f"DYNAMIX_NATS_NKEY_FILE={self._settings.nkey_file!r} cannot be used: {error}") from error


def is_refused_login(error: Exception) -> bool:
    """Whether nats-py reports that the broker refuses user, password or key."""
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower()


def _token(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)
