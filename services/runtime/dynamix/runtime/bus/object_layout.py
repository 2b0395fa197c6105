"""The standard layout of a JetStream object store: names of streams and subjects, and what is written about an object.

As the official tools have it (NATS ADR-20): the bucket is the stream `OBJ_<bucket>`; an object's bytes are chunks on
`$O.<bucket>.C.<nuid>`, a subject of this one upload; the last message on `$O.<bucket>.M.<name in base64>` describes it.
No I/O.
"""

import base64
import binascii
import datetime as dt
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from .errors import ObjectBrokenError

CHUNK_BYTES = 128 * 1024
"""The layout's own default; with headers it is far below a broker's limit of 1 MB."""

MAX_NAME_BYTES = 512
DIGEST_PREFIX = "SHA-256="

_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ObjectLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an object points to: another object, or a whole bucket."""

    bucket: str
    name: str = ""


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an object is stored."""

    max_chunk_size: int | None = None
    link: ObjectLink | None = None
    """Ours never have one."""


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a bucket says about an object; the field names are the layout's.

    Others may leave out or set to null what has a default: a deleted object has no size, an old client no metadata.
    """

    name: str
    bucket: str
    nuid: str = ""
    """Names this upload: the last token of its chunks' subject."""
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes."""
    chunks: Annotated[int, msgspec.Meta(ge=0)] = 0
    digest: str = ""
    """`SHA-256=` and the digest in URL-safe base64."""
    mtime: str = ""
    """When it was put, as RFC 3339."""
    deleted: bool = False
    options: ObjectOptions | None = None
    metadata: dict[str, str] = {}

    @property
    def sha256(self) -> bytes:
        """The digest's 32 bytes. Raises ObjectBrokenError when `digest` is none."""
        try:
            value = base64.urlsafe_b64decode(self.digest[len(DIGEST_PREFIX) :] + "==")
        except (binascii.Error, ValueError):
            value = b""
        if not self.digest.upper().startswith(DIGEST_PREFIX) or len(value) != hashlib.sha256().digest_size:
            raise ObjectBrokenError(f"object {self.name!r}: {self.digest!r} is no SHA-256 digest")
        return value


def stream_of(bucket: str) -> str:
    """The stream that a bucket is. Raises ValueError when no bucket can have this name."""
    if _BUCKET.fullmatch(bucket) is None:
        raise ValueError(f"{bucket!r} is no name of a bucket: use 1 to 64 of the characters A-Z, a-z, 0-9, '_' and '-'")
    return f"OBJ_{bucket}"


def all_chunks(bucket: str) -> str:
    """The subjects of all chunks of a bucket."""
    return f"$O.{bucket}.C.>"


def all_descriptions(bucket: str) -> str:
    """The subjects of all descriptions of a bucket."""
    return f"$O.{bucket}.M.>"


def chunk_subject(bucket: str, nuid: str) -> str:
    """Subject of the chunks of one upload.

    Raises:
        ObjectBrokenError: when `nuid`, which may come from a foreign description, is not one token.
    """
    if not nuid.isalnum() or not nuid.isascii():
        raise ObjectBrokenError(f"{nuid!r} names no upload in bucket {bucket}")
    return f"$O.{bucket}.C.{nuid}"


def description_subject(bucket: str, name: str) -> str:
    """Subject of the description of an object. Raises ValueError when the name is empty or over `MAX_NAME_BYTES`."""
    encoded = name.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ValueError(f"an object's name has 1 to {MAX_NAME_BYTES} bytes, not {len(encoded)}")
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(encoded).decode()}"


def describe_object(
    bucket: str, name: str, *, nuid: str, size: int, sha256: bytes, metadata: Mapping[str, str]
) -> ObjectInfo:
    """The description of an object whose chunks are stored."""
    return ObjectInfo(
        name=name,
        bucket=bucket,
        nuid=nuid,
        size=size,
        chunks=-(-size // CHUNK_BYTES),
        digest=DIGEST_PREFIX + base64.urlsafe_b64encode(sha256).decode(),
        mtime=_now(),
        options=ObjectOptions(max_chunk_size=CHUNK_BYTES),
        metadata=dict(metadata),
    )


def describe_deleted(info: ObjectInfo) -> ObjectInfo:
    """What is left of an object that is deleted: its name, so that others learn of it."""
    return msgspec.structs.replace(info, deleted=True, size=0, chunks=0, digest="", mtime=_now())


def read_description(payload: bytes) -> ObjectInfo:
    """The description in a message. Raises ObjectBrokenError when it is none."""
    try:
        fields = msgspec.json.decode(payload, type=dict[str, Any])
        return msgspec.convert({key: value for key, value in fields.items() if value is not None}, ObjectInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ObjectBrokenError(f"the description of an object cannot be read: {error}") from error


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat().replace("+00:00", "Z")
