"""NATS credentials: nkeys (Ed25519 keys in NATS's spelling), the JWTs that they sign, and the file that holds both.

An nkey is base32 without padding of a prefix that names its kind (two bytes in a seed), 32 bytes and a CRC-16 in little
endian. A credential (`.creds`) is a user's JWT, signed by the broker's authority, and the seed of the key that it is
about: the broker reads from it who this is, and needs no entry of its own. The `nats` command reads the same file.
"""

import base64
import binascii
import hashlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .input_files import read_regular

MAX_FILE_BYTES = 64 * 1024
KEY_BYTES = 32
_SEED = 18 << 3
_KINDS = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_BLOCK = r"-{3,}BEGIN %s-{3,}\s*(\S+)\s*-{3,}END %s-{3,}"
_JWT, _USER_SEED = "NATS USER JWT", "USER NKEY SEED"


class Key:
    """A key pair.

    Attributes:
        seed: the secret half, which begins with S.
        public: the public half, which begins with O, A or U.
    """

    def __init__(self, seed: str) -> None:
        """Take the pair of a seed. Raises ValueError when it is none; the text never shows it."""
        from nacl.signing import SigningKey  # noqa: PLC0415 - libsodium, only where there is a key

        raw = _decode(seed)
        if len(raw) != 2 + KEY_BYTES or raw[0] & 0xF8 != _SEED:
            raise ValueError("it is not the seed of an nkey")
        self.seed = seed
        self._signing: SigningKey = SigningKey(raw[2:])
        kind = (raw[0] & 7) << 5 | raw[1] >> 3
        self.public = _encode(bytes([kind]) + bytes(self._signing.verify_key))

    @classmethod
    def generate(cls, kind: Literal["operator", "account", "user"]) -> "Key":
        """A new pair."""
        from nacl.utils import random  # noqa: PLC0415 - see __init__

        prefix = _KINDS[kind]
        return cls(_encode(bytes([_SEED | prefix >> 5, (prefix & 0x1F) << 3]) + random(KEY_BYTES)))

    def sign(self, text: str) -> bytes:
        """The signature."""
        return self._signing.sign(text.encode()).signature

    def sign_jwt(self, subject: str, name: str, claims: Mapping[str, Any], **top: Any) -> str:
        """A JWT about `subject`, a public key; `claims` are NATS's own, `top` such as `exp`."""
        body = {"iss": self.public, "sub": subject, "iat": int(time.time()), "name": name, **top, "nats": claims}
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        text = f"{_base64url({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_base64url(body)}"
        return f"{text}.{base64.urlsafe_b64encode(self.sign(text)).decode().rstrip('=')}"


class Credential(NamedTuple):
    """What a credential's file holds."""

    jwt: str
    seed: str
    name: str
    """The user's."""
    public: str
    tags: tuple[str, ...] = ()
    """What the key is limited to, such as `job:mnist`."""
    expires_s: int | None = None
    """Unix time after which the broker refuses it; `None`: never."""

    def __repr__(self) -> str:
        return f"Credential(name={self.name!r}, public={self.public!r}, seed=***)"

    def limited_to(self, what: str) -> list[str]:
        """The values of one tag: `limited_to("job")` are the names of jobs that a trainer's key is for."""
        return [tag.removeprefix(f"{what}:") for tag in self.tags if tag.startswith(f"{what}:")]

    def text(self) -> str:
        """The file's content."""
        parts = ((_JWT, self.jwt), (_USER_SEED, self.seed))
        return "\n".join(f"-----BEGIN {what}-----\n{value}\n------END {what}------\n" for what, value in parts)


def credential_of(jwt: str, seed: str) -> Credential:
    """The credential of a JWT, whose signature is for the broker to check, and a seed.

    Raises ValueError when it is no JWT, or of another key.
    """
    try:
        body = jwt.split(".")[1]
        claims = dict(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        name, public, tags = str(claims["name"]), str(claims["sub"]), tuple(claims["nats"].get("tags", ()))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError("its JWT is damaged") from error
    if public != Key(seed).public:
        raise ValueError("its JWT is of another key than its seed")
    return Credential(jwt, seed, name, public, tags, claims.get("exp"))


def read_credential(path: Path) -> Credential:
    """Read a credential. Raises OSError when it cannot be read, ValueError when it is none."""
    text = read_regular(path, max_bytes=MAX_FILE_BYTES).decode(errors="replace")
    jwt, seed = (re.search(_BLOCK % (what, what), text) for what in (_JWT, _USER_SEED))
    if jwt is None or seed is None:
        raise ValueError("it has no NATS USER JWT and USER NKEY SEED")
    return credential_of(jwt[1], seed[1])


def _base64url(value: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


def _encode(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        checked = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError) as error:
        raise ValueError("it is not an nkey: not in base32") from error
    raw, check = checked[:-2], checked[-2:]
    if binascii.crc_hqx(raw, 0).to_bytes(2, "little") != check:
        raise ValueError("it is not an nkey: its check sum is wrong, so that a character is missing or mistyped")
    return raw
