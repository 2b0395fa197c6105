"""NATS credentials: nkeys (Ed25519 keys in NATS's spelling), the JWTs that they sign, and the file that holds both.

An nkey is base32 without padding of a prefix that names its kind (two bytes in a seed), 32 bytes and a CRC-16 in little
endian. A credential (`.creds`) is a user's JWT, signed by the broker's authority, and the seed of the key that it is
about: the broker reads from it who this is, and needs no entry of its own. The `nats` command reads the same file.
"""

import base64
import binascii
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .input_files import read_secret

KEY_BYTES = 32
_SEED = 18 << 3
_KINDS = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_BLOCK = r"-{3,}BEGIN %s-{3,}\s*(\S+)\s*-{3,}END %s-{3,}"
_JWT, _USER_SEED = "NATS USER JWT", "USER NKEY SEED"


class Key:
    """A key pair: `seed` is the secret half, which begins with S, `public` the other, which begins with O, A or U."""

    def __init__(self, seed: str) -> None:
        """Make the pair of a seed. Raises ValueError, which never shows the seed."""
        from nacl.signing import SigningKey  # noqa: PLC0415 - libsodium, only where there is a key

        try:
            raw = base64.b32decode(seed + "=" * (-len(seed) % 8))[:-2]
        except ValueError as error:
            raise ValueError("it is not an nkey: not in base32") from error
        if _encode(raw) != seed:
            raise ValueError("it is not an nkey: its check sum is wrong, so that a character is missing or mistyped")
        if len(raw) != 2 + KEY_BYTES or raw[0] & 0xF8 != _SEED:
            raise ValueError("it is not the seed of an nkey")
        self.seed = seed
        self._signing: SigningKey = SigningKey(raw[2:])
        kind = (raw[0] & 7) << 5 | raw[1] >> 3
        self.public = _encode(bytes([kind]) + bytes(self._signing.verify_key))

    @classmethod
    def generate(cls, kind: Literal["operator", "account", "user"]) -> "Key":
        """A new pair."""
        return cls(_encode(bytes([_SEED | _KINDS[kind] >> 5, (_KINDS[kind] & 0x1F) << 3]) + os.urandom(KEY_BYTES)))

    def sign(self, text: str) -> bytes:
        """The signature."""
        return self._signing.sign(text.encode()).signature

    def sign_jwt(self, subject: str, name: str, claims: Mapping[str, Any], **top: Any) -> str:
        """A JWT about `subject`, a public key; `claims` are NATS's own, `top` such as `exp`."""
        body = {"iss": self.public, "sub": subject, "iat": int(time.time()), "name": name, **top, "nats": claims}
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        text = ".".join(_base64url(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        return f"{text}.{_base64url(self.sign(text))}"


class Credential(NamedTuple):
    """A credential's file, with the claims of its JWT."""

    jwt: str
    seed: str
    name: str
    public: str
    tags: tuple[str, ...] = ()
    """Limits of the key, such as `job:mnist`."""
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


def read_credential(path: Path) -> Credential:
    """Read a credential without checking its signature. Raises ValueError for other content, or OSError."""
    text = read_secret(path).decode(errors="replace")
    jwt, seed = (re.search(_BLOCK % (what, what), text) for what in (_JWT, _USER_SEED))
    if jwt is None or seed is None:
        raise ValueError("it has no NATS USER JWT and USER NKEY SEED")
    try:
        body = jwt[1].split(".")[1]
        claims = dict(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        name, public, tags = str(claims["name"]), str(claims["sub"]), tuple(claims["nats"].get("tags", ()))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError("its JWT is damaged") from error
    if public != Key(seed[1]).public:
        raise ValueError("its JWT is of another key than its seed")
    return Credential(jwt[1], seed[1], name, public, tags, claims.get("exp"))


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _encode(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")
