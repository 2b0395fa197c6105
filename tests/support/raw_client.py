"""nats-py as it is, with a credential: what a hostile client would use, which none of our own checks holds back."""

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamix.runtime.credentials import Key, read_credential
from dynamix.runtime.settings import BusSettings

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


class RawClient:
    """One connection.

    Attributes:
        refused: pairs of what (`publish` or `subscription`) and subject, in small letters.
        heard: what came to `hear`.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.inbox = f"_INBOX.{name}.raw"
        self.refused: set[tuple[str, str]] = set()
        self.errors: list[str] = []
        self.heard: list[Msg] = []

    async def hear(self, *subjects: str) -> None:
        for subject in subjects:
            await self.client.subscribe(subject, cb=self._note)
        await self.settle()

    async def send(self, subject: str, payload: bytes = b"", reply: str = "", **headers: str) -> None:
        await self.client.publish(subject, payload, reply, headers=headers or None)

    async def ask(self, subject: str, payload: bytes = b"", **headers: str) -> Msg:
        """The answer to a request."""
        return await self.client.request(subject, payload, timeout=30, headers=headers or None)

    async def settle(self) -> None:
        """Wait until the broker has handled what was sent, and what it does then has come."""
        for _ in range(2):
            await self.client.flush(30)
            await asyncio.sleep(0.1)

    async def _note(self, message: Msg) -> None:
        self.heard.append(message)

    async def note_error(self, error: Exception) -> None:
        self.errors.append(str(error))
        if found := _VIOLATION.search(str(error)):
            self.refused.add((found[1].lower(), found[2].lower()))


@contextlib.asynccontextmanager
async def raw_client(settings: BusSettings) -> AsyncIterator[RawClient]:
    """Connected with the credential of `settings`; never reconnects."""
    credential = read_credential(Path(settings.creds_file))
    key, client = Key(credential.seed), Client()
    raw = RawClient(client, credential.name)
    connecting = client.connect(
        settings.url,
        error_cb=raw.note_error,
        allow_reconnect=False,
        inbox_prefix=raw.inbox,
        user_jwt_cb=lambda: bytearray(credential.jwt.encode()),
        signature_cb=lambda nonce: base64.b64encode(key.sign(nonce)),
        connect_timeout=30,
    )
    try:
        await connecting
        yield raw
    finally:
        await client.close()
        if client._transport is not None:  # nats-py leaves it open when the broker refuses the login
            client._transport.close()
