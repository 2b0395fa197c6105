"""HTTP as a probe or a scraper speaks it."""

import asyncio
import contextlib
import http.client
import os
import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def free_ports_in_a_row(number: int) -> int:
    """The first of so many ports, below those that the kernel gives to connections."""
    for first in range(20_000 + os.getpid() % 1000 * 10, 32_000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + number):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("all ports are in use")


async def get(port: int, path: str, timeout_s: float = 120.0) -> tuple[int, str]:
    """Status and body."""

    def fetch() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(fetch)
