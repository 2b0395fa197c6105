"""A TCP proxy between a client and the broker that can lose the answers, and cut the line."""

import asyncio
import contextlib
from typing import Self


class Proxy:
    """Forwards to 127.0.0.1:`port`.

    Attributes:
        losing_answers: swallow everything the broker sends.
        num_bytes_lost: swallowed so far.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.losing_answers = False
        self.num_bytes_lost = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Break every connection at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            broker, to_broker = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            to_client.transport.abort()
            return
        both = {to_client, to_broker}
        self._writers |= both
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                self._pump(client, to_broker, answers=False), self._pump(broker, to_client, answers=True)
            )
        self._writers -= both
        for writer in both:
            writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if answers and self.losing_answers:
                    self.num_bytes_lost += len(data)
                else:
                    target.write(data)
                    await target.drain()
        target.close()
