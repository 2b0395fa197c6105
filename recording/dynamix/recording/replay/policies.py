"""The bucket of policies as a replayed arbitrator finds it: files handed in, under their recorded versions."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learned.policy_store import BUCKET
from dynamix.arbitrator.learned.shipped import SHIPPED_VERSION, shipped_policy
from dynamix.runtime.bus import ObjectInfo, ObjectMissingError, StoredObject
from dynamix.runtime.bus.objects.layout import DIGEST_PREFIX
from dynamix.schemas.messages import Action

from .errors import ReplayError

HANDED_IN_VERSION = SHIPPED_VERSION + 1
"""Of a file that decided nothing here: newer than what comes with the package."""


class _File(NamedTuple):
    name: str
    data: bytes
    digest: bytes


class PolicyFiles:
    """Learned policies at hand, beside those that come with the package."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the files.

        Raises:
            ReplayError: when one cannot be read.
            ValueError: when one is no policy file; the text says why.
        """
        self._files = [_read(path) for path in paths]
        self._data: dict[str, _File] = {}

    @property
    def names(self) -> list[str]:
        """What the files say that they are."""
        return [file.name for file in self._files]

    def listed(self, decided: Action | None) -> list[ObjectInfo]:
        """The bucket while a generation's policy is looked for; `decided` is the next recorded action, if any counts.

        Raises:
            ReplayError: when that was decided by a file that is not at hand.
        """
        named = {(file.name, HANDED_IN_VERSION): file for file in self._files}
        if decided is not None and decided.policy_digest:
            found = next((file for file in self._files if file.digest == decided.policy_digest), None)
            if found is None:
                _check_shipped(decided)
            else:
                named = {(decided.policy, decided.policy_version): found}
        self._data = {f"{name}/{version}": file for (name, version), file in named.items()}
        return [_info(name, file) for name, file in self._data.items()]

    def get(self, name: str) -> StoredObject:
        """A listed object. Raises ObjectMissingError when there is none."""
        file = self._data.get(name)
        if file is None:
            raise ObjectMissingError(f"no policy file was handed in as {name}")
        return StoredObject(_info(name, file), file.data)


def _read(path: Path) -> _File:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReplayError(f"cannot read the policy file {path}: {error.strerror}") from error
    return _File(PolicyFile.from_bytes(data, str(path)).metadata.policy, data, hashlib.sha256(data).digest())


def _check_shipped(decided: Action) -> None:
    shipped = shipped_policy(decided.policy) if decided.policy_version == SHIPPED_VERSION else None
    if shipped is not None and hashlib.sha256(shipped).digest() == decided.policy_digest:
        return
    raise ReplayError(
        f"version {decided.policy_version} of policy {decided.policy!r} decided here, a file that is not at hand "
        f"(SHA-256 {decided.policy_digest.hex()[:16]}...): give it with --policy-file; `dynamix policy export` gets it "
        "from the bus"
    )


def _info(name: str, file: _File) -> ObjectInfo:
    digest = DIGEST_PREFIX + base64.urlsafe_b64encode(file.digest).decode()
    return ObjectInfo(name=name, bucket=BUCKET, nuid=name, size=len(file.data), chunks=1, digest=digest)
