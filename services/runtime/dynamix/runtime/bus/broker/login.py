"""Who we are to the broker: a user with a password, or a credential; and what says that it refuses us."""

import base64
import contextlib
import datetime as dt
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import nats.errors

from dynamix.runtime.credentials import Key
from dynamix.runtime.settings import BusSettings, credential_in, password_of, redact_url

Sign = Callable[[str], bytes]

SIGNATURE_BYTES = 8
"""In a message's identity."""

API = "$JS.API."
"""Prefix of requests to JetStream."""


class Login:
    """The user of one connection. Files are read for each attempt to connect, so that what they hold can be replaced.

    Attributes:
        user: its name; empty without one.
        inbox: prefix of every subject that this connection listens to for replies: `_INBOX.<user>.<name>.<random>`.
            The user comes first because the broker's permissions are per user, and a wildcard is a whole token.
        has_key: whether a key signs the broker's challenge, in place of a password.
    """

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Raises ValueError, naming the file, for a credential that cannot be used."""
        self._settings = settings
        self._credential = credential_in(settings)
        self.has_key = self._credential is not None
        owner = self._credential.name if self._credential else unquote(urlsplit(settings.url).username or "")
        self.user = owner if self.has_key else settings.user or owner
        parts = (re.sub(r"[^A-Za-z0-9_-]", "-", part) for part in (self.user, name) if part)
        self.inbox = ".".join(("_INBOX", *parts, secrets.token_hex(8)))
        self._secret = self._credential.seed.encode() if self._credential else b""

    @property
    def seconds_left(self) -> float | None:
        """Until the credential of the last attempt to connect expires; `None` where it never does."""
        expires_s = self._credential.expires_s if self._credential else None
        return None if expires_s is None else expires_s - time.time()

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
        """The JWT, and what signs with its key; raises nats-py's error where the file is broken or another user's."""
        try:
            credential = credential_in(self._settings)
        except ValueError as error:
            raise nats.errors.Error(f"nats: {error}") from error
        assert credential is not None, "asked with a credential only"
        if credential.name != self.user:  # whose inbox it may not listen to
            what = f"{self._settings.creds_file} is now {credential.name}'s, not {self.user}'s"
            raise nats.errors.Error(f"nats: {what}: restart this process")
        self._credential, key = credential, Key(credential.seed)
        return credential.jwt, lambda nonce: base64.b64encode(key.sign(nonce))

    def refusal(self) -> str:
        """What to say where the broker refuses us."""
        check, credential = "check DYNAMIX_NATS_USER and DYNAMIX_NATS_PASSWORD_FILE", self._credential
        if credential is not None:
            check = f"{self._settings.creds_file} was revoked, or is of another broker's authority"
            if credential.expires_s is not None and credential.expires_s <= time.time():
                when = dt.datetime.fromtimestamp(credential.expires_s, dt.UTC)
                check = f"{self._settings.creds_file} expired on {when:%Y-%m-%d %H:%M} UTC"
            check += "; replace it by a new one of `dynamix keys create`"
        elif not self.password():
            check = "there is no credential: set DYNAMIX_NATS_CREDS_FILE to a key of `dynamix keys create`"
        return f"{redact_url(self._settings.url)} refuses user {self.user!r}: {check}"


def is_refused_login(error: Exception) -> bool:
    """Whether nats-py reports that the broker refuses user, password or key."""
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower()
