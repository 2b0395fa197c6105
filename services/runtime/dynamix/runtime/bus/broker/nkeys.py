"""nkeys of users: Ed25519 keys in NATS's own spelling, which sign the challenge that the broker sends.

Base32 without padding of one byte that names the kind of key (two in a seed), 32 bytes, and a CRC-16 in little endian.
The broker knows the public key only, so that its configuration holds no secret.
"""

import base64
import binascii
import secrets

from nacl.signing import SigningKey

_SEED = 18 << 3
_USER = 20 << 3
_SEED_PREFIX = bytes([_SEED | _USER >> 5, (_USER & 0x1F) << 3])
_KEY_BYTES = 32


class UserKey:
    """A user's key pair.

    Attributes:
        public: the public key, which begins with U.
    """

    def __init__(self, seed: str) -> None:
        """Take the key of a seed. Raises ValueError when it is not one of a user; the text never shows it."""
        raw = _decode(seed)
        if len(raw) != len(_SEED_PREFIX) + _KEY_BYTES or not raw.startswith(_SEED_PREFIX):
            raise ValueError("it is no seed of a user's nkey")
        self._signing = SigningKey(raw[len(_SEED_PREFIX) :])
        self.public = _encode(bytes([_USER]) + bytes(self._signing.verify_key))

    def sign(self, nonce: str) -> bytes:
        """The signature of the broker's challenge, in base64."""
        return base64.b64encode(self._signing.sign(nonce.encode()).signature)


def new_seed() -> str:
    """A new user's seed, which begins with SU."""
    return _encode(_SEED_PREFIX + secrets.token_bytes(_KEY_BYTES))


def _encode(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        checked = base64.b32decode(text + "=" * (-len(text) % 8))
    except binascii.Error as error:
        raise ValueError("it is no nkey: not in base32") from error
    raw, check = checked[:-2], checked[-2:]
    if binascii.crc_hqx(raw, 0).to_bytes(2, "little") != check:
        raise ValueError("it is no nkey: its check sum is wrong, so that a character is missing or mistyped")
    return raw
