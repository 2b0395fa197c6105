"""The connection: when it waits, when it gives up, what it never does."""

import asyncio
from pathlib import Path

import pytest
from tests.support import examples
from tests.support.brokers import ConfiguredServer, connected, publish_unstored, until

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, connection, publish
from dynamix.runtime.bus.connection import BrokerConnection
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.settings import BusSettings, check_url

ALLOWED = (
    "{user: admin, password: admin-pw},"
    '{user: writer, password: writer-pw, permissions: {publish: ["dynamix.v1.state.>", "$JS.API.STREAM.INFO.FEED",'
    '"$JS.API.STREAM.INFO.REPORTS",'
    '"$JS.API.CONSUMER.CREATE.FEED.*.dynamix.v1.state.>"], subscribe: "_INBOX.writer.>"}},'
    '{user: deaf, password: deaf-pw, permissions: {publish: ">", subscribe: "nothing"}}'
)


async def test_a_wrong_password_is_raised_at_once_and_not_retried(server: ConfiguredServer) -> None:
    with pytest.raises(PermissionDeniedError, match=r"refuses user 'dynamix': check DYNAMIX_NATS_USER") as refused:
        await Bus.connect(server.user("dynamix", "wrong-password"), name="test")
    assert "wrong-password" not in str(refused.value)


async def test_without_waiting_a_missing_broker_is_an_error(server: ConfiguredServer) -> None:
    await server.stop()
    with pytest.raises(BusError, match=rf"cannot connect to nats://127.0.0.1:{server.port}"):
        await Bus.connect(server.settings, name="test", wait=False)


async def test_the_first_connection_waits_for_a_broker_that_comes_later_and_says_so_once(
    server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await server.stop()
    retried = asyncio.Event()
    is_new_reason = BrokerConnection._is_new_reason

    def judged(self: BrokerConnection, error: Exception) -> bool:
        if "waiting for the broker" in caplog.text:
            retried.set()
        return is_new_reason(self, error)

    monkeypatch.setattr(BrokerConnection, "_is_new_reason", judged)
    connecting = asyncio.create_task(Bus.connect(server.settings, name="test"))
    await retried.wait()
    await server.start()
    bus = await connecting
    assert bus.is_connected
    await bus.close()
    waiting, connected_again = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert waiting.startswith(f"waiting for the broker at nats://127.0.0.1:{server.port}: ")
    assert connected_again == f"connected to the broker at nats://127.0.0.1:{server.port}"


async def test_it_reconnects_beyond_the_sixty_attempts_after_which_nats_py_would_give_up(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[object] = []
    monkeypatch.setattr(connection, "RECONNECT_WAIT_S", 0.002)
    monkeypatch.setattr(BrokerConnection, "_is_new_reason", lambda *given: attempts.append(given))
    await server.kill()
    await until(lambda: len(attempts) > 100)
    await server.start()
    assert await bus.publish(examples.state()) == 1


async def test_a_frozen_server_is_left_for_another(server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay open, and it would take a new one, too."""
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.2)
    second = ConfiguredServer()
    second._password = server.settings.password
    async with second:
        both = {one.settings.url: one for one in (server, second)}
        for one in both.values():
            async with connected(one.settings) as admin:
                await provision(admin)
        async with connected(BusSettings(url=",".join(both), user="dynamix", password=server.settings.password)) as bus:
            await bus.publish(examples.state())
            (holder,) = [one for one in both.values() if await num_stored(one) == 1]
            holder.pause()
            try:
                await until(lambda: bus.counters["reconnects"])
                assert await bus.publish(examples.state(window_index=1)) == 1
            finally:
                holder.go_on()


async def test_a_server_that_answers_and_stores_nothing_is_left_for_another(
    server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is like one that is cut off from the others of its cluster; here it has no streams."""
    monkeypatch.setattr(connection, "LEAVE_AFTER_S", 0.3)
    monkeypatch.setattr(connection, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(publish, "LATE_S", 0.2)
    second = ConfiguredServer()
    second._password = server.settings.password
    async with second, connected(server.settings) as admin:
        await provision(admin)
        url = f"{second.settings.url},{server.settings.url}"
        for _ in range(6):  # it begins with either
            async with connected(BusSettings(url=url, user="dynamix", password=server.settings.password)) as bus:
                await bus.publish(examples.state())
        assert (await admin.stream_state("FEED")).num_messages == 1


async def num_stored(server: ConfiguredServer) -> int:
    async with connected(server.settings) as bus:
        return (await bus.stream_state("FEED")).num_messages


async def test_a_password_file_is_read_at_every_connection(server: ConfiguredServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(server.settings.password + "\n")
    settings = BusSettings(url=server.settings.url, user="dynamix", password_file=str(file))
    async with connected(settings) as bus:
        await server.stop()
        server._password = "rotated"
        file.write_text("rotated")
        await server.start()
        await until(lambda: bus.is_connected)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_changed_password_closes_the_connection_once_with_a_reason(
    server: ConfiguredServer, restarted: bool
) -> None:
    reasons: list[str] = []
    async with connected(server.settings, on_closed=reasons.append) as bus:
        if restarted:
            await server.stop()
        server._password = "rotated"
        if restarted:
            await server.start()
        else:
            server.reload()
        await until(lambda: reasons)
        with pytest.raises(BusError, match="closed"):
            await bus.publish(examples.state())
    (reason,) = reasons
    assert any(word in reason for word in ("authentication", "authorization", "refuses user"))


async def test_a_handler_that_raises_leaves_the_connection_alive(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("made up")

    await bus._connection.subscribe("somewhere", broken)
    await publish_unstored(bus, "somewhere", b"")
    await until(lambda: "error while handling a message on somewhere" in caplog.text)
    assert await bus.publish(examples.state()) == 1


async def test_a_missing_permission_is_an_error_that_names_the_subject() -> None:
    guarded, denied = ConfiguredServer(authorization=f"users: [{ALLOWED}]"), PermissionDeniedError
    async with guarded, connected(guarded.user("admin", "admin-pw")) as admin:
        await provision(admin)
        with pytest.raises(denied, match=r"'deaf' listen to _inbox.deaf.test"):
            await Bus.connect(guarded.user("deaf", "deaf-pw"), name="test")
        async with connected(guarded.user("writer", "writer-pw")) as bus:
            with pytest.raises(denied, match=r"'writer' publish to dynamix.v1.action.mnist.0a1b2c3d"):
                await bus.publish_next(examples.action(), expected_last=0)
            with pytest.raises(denied, match=r"STREAM.INFO.JOBS|stream.info.jobs"):
                await bus.stream_state("JOBS")
            assert bus.counters["permission_denials"] == 2
            assert bus.counters["in_flight"] == 0
            with pytest.raises(denied, match=r"consumer\.info"):
                async with bus.consume("REPORTS", ["dynamix.v1.report.>"], start="all", durable="d"):
                    pass
            with pytest.raises(denied, match=r"direct\.get"):
                async with bus.consume("FEED", ["dynamix.v1.state.>"], start="all") as reader:
                    await anext(reader)
            with pytest.raises(denied, match=r"listen to dynamix.v1.live.>"):
                async with bus.subscribe("dynamix.v1.live.>") as messages:
                    await anext(messages)
            assert await bus.publish(examples.state()) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        *((url, "never used without credentials") for url in ("nats://10.0.0.1:4222", "broker.example")),
        ("nats://127.0.0.1:4222,nats://10.0.0.1:4222", "never used without credentials"),
        *((url, "is no URL: write nats://host:port") for url in ("foo:x", "nats://", "nats://127.0.0.1:port", "")),
        ("127.0.0.1:99999", "is no URL: write nats://host:port"),
        ("ws://me:secret@10.0.0.1", r"ws://me:\*\*\*@10.0.0.1: the bus speaks"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_url(BusSettings(url=url))


def test_credentials_allow_another_machine_and_are_never_shown() -> None:
    settings = BusSettings(url="nats://me:secret@10.0.0.1:4222", password="hush")
    check_url(settings)
    check_url(BusSettings(url="nats://10.0.0.1:4222", user="collector"))
    assert "secret" not in repr(settings)
    assert "hush" not in repr(settings)


async def test_no_password_is_sent_in_clear_text_when_tls_is_required(server: ConfiguredServer) -> None:
    settings = BusSettings(url=f"tls://127.0.0.1:{server.port}", user="dynamix", password=server.settings.password)
    with pytest.raises(BusError, match="offers no TLS although it is demanded"):
        await Bus.connect(settings, name="test", wait=False)


async def test_a_login_goes_out_in_one_piece_so_that_its_refusal_is_read() -> None:
    heard: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"auth_required":true,"max_payload":1048576,"version":"2.15.1","headers":true}\r\n')
        heard.append(await reader.read(65536))
        writer.write(b"-ERR 'Authorization Violation'\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = BusSettings(url=f"nats://127.0.0.1:{port}", user="someone", password="wrong")
        with pytest.raises(PermissionDeniedError, match="refuses user 'someone'"):
            await Bus.connect(settings, name="login", wait=False)
    assert heard[0].startswith(b"CONNECT {")
    assert heard[0].endswith(b"}\r\nPING\r\n")
