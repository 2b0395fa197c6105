"""What each role's key may do on the real broker, and what a hostile holder of one may not: SECURITY.md's table."""

import json
from collections.abc import AsyncIterator

import pytest
from tests.support.brokers import until
from tests.support.deployed_broker import DeployedBroker
from tests.support.raw_client import RawClient, raw_client

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.authority import MAX_SUBSCRIPTIONS, ROLES
from dynamix.schemas.codec import MAX_TRAINER_BYTES
from dynamix.schemas.streams import STREAMS

V1, API = "dynamix.v1.", "$JS.API."
LETTERS = {"trainer": "t", "collector": "c", "reward": "r", "arbitrator": "a", "learner": "l", "watcher": "w"}
"""The keys are for job alice.r1, node node-a and instance 1; `bob.r1`, `node-b` and `2` are others."""
NAMES = [stream.name for stream in STREAMS]
DURABLE_VERBS = ("INFO", "MSG.NEXT", "RESET")
READERS = {"JOBS": "alw", "FEED": "alw", "ACTIONS": "alw", "PROFILES": "aw", "POLICIES": "alw"}
"""Who may read a stream by its API; the watcher may read all."""
READ_VERBS = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")


def messages() -> dict[str, str]:
    """Who may publish our messages, in letters."""
    table = {f"{V1}policy.p": "l", f"{V1}profile.f": "a"}
    for kind, own, others in (
        ("job", "t", ""),
        ("applied", "t", ""),
        ("action", "a", "a"),
        ("event", "al", "al"),
        ("dead.report", "tcral", "cral"),
    ):
        table |= {f"{V1}{kind}.alice.r1": own, f"{V1}{kind}.bob.r1": others}
    for kind, letters in (  # own job on the own node and on another, another job on both
        ("report", ("t", "t", "", "")),
        ("window", ("c", "", "c", "")),
        ("state", ("c", "", "c", "")),
        ("trace", ("c", "", "c", "")),
        ("reward", ("r", "r", "r", "r")),
    ):
        places = [f"{job}.{node}" for job in ("alice.r1", "bob.r1") for node in ("node-a", "node-b")]
        table |= {f"{V1}{kind}.{place}": who for place, who in zip(places, letters, strict=True)}
    for live, who in (
        ("trainer.t", "t"),
        ("collector.node-a", "c"),
        ("collector.node-b", ""),
        ("reward.1", "r"),
        ("reward.2", ""),
        ("arbitrator.a", "a"),
        ("learner.l", "l"),
    ):
        table[f"{V1}live.{live}"] = who
    return table


def jetstream() -> dict[str, str]:
    """Who may ask JetStream for what; nothing that is here without a letter is allowed to any of them."""
    table = {f"{API}INFO": "aw"}
    for stream, kind in (("JOBS", "job"), ("ACTIONS", "action")):
        table[f"{API}DIRECT.GET.{stream}.{V1}{kind}.alice.r1"] = "t"
        table[f"{API}DIRECT.GET.{stream}.{V1}{kind}.bob.r1"] = ""
    for stream in NAMES:
        table |= {f"{API}{verb}.{stream}": READERS.get(stream, "w") for verb in READ_VERBS}
    for stream, readers in (("FEED", "r"), ("REPORTS", "ca"), ("DEAD", "a")):
        table[f"{API}STREAM.INFO.{stream}"] += readers
    for kept, durable, who in (
        ("REPORTS", "collector-node-a", "c"),
        ("REPORTS", "collector-node-b", ""),
        ("FEED", "reward-1", "r"),
        ("FEED", "reward-2", ""),
    ):
        for stream, allowed in ((kept, who), ("JOBS", "")):
            table |= {f"{API}CONSUMER.{verb}.{stream}.{durable}": allowed for verb in DURABLE_VERBS}
            table |= {f"{ack}.{stream}.{durable}.1.1.1.1.1": allowed for ack in ("$JS.ACK", "$JS.ACK._.acc")}
    for stream in NAMES:
        for verb in ("CREATE", "UPDATE", "DELETE", "MSG.DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN"):
            table[f"{API}STREAM.{verb}.{stream}"] = ""
        table |= {f"{API}CONSUMER.{verb}.{stream}": "" for verb in ("CREATE", "LIST", "NAMES")}
        for verb in ("DELETE", "PAUSE", "UNPIN", "LEADER.STEPDOWN", "DURABLE.CREATE"):
            table[f"{API}CONSUMER.{verb}.{stream}.collector-node-a"] = ""
        table[f"{API}CONSUMER.CREATE.{stream}.x"] = ""
        table[f"{API}CONSUMER.CREATE.{stream}.x.{V1}report.alice.r1.node-a"] = ""
        table.setdefault(f"{API}STREAM.PURGE.{stream}", "")
    for subject in (
        *(f"{API}{name}" for name in ("STREAM.LIST", "STREAM.NAMES", "META.LEADER.STEPDOWN", "ACCOUNT.PURGE.streams")),
        *(f"{V1}stored.action.{job}" for job in ("alice.r1", "bob.r1")),
        *("_INBOX.bob.x", "_R_.x", "$SRV.PING", "$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.SERVER.PING"),
        *("dynamix.v2.anything", "anything"),
    ):
        table[subject] = ""
    return table


PUBLISH = messages() | jetstream()
HEAR = {
    f"{V1}reward.alice.r1.node-a": "",
    f"{V1}reward.bob.r1.node-b": "",
    f"{V1}trace.alice.r1.node-a": "t",
    f"{V1}trace.bob.r1.node-b": "",
    f"{V1}report.alice.r1.node-a": "",
    f"{V1}report.bob.r1.node-b": "",
    f"{V1}stored.job.alice.r1": "alw",
    f"{V1}stored.job.bob.r1": "alw",
    f"{V1}stored.action.alice.r1": "tlw",
    f"{V1}stored.action.bob.r1": "lw",
    f"{V1}stored.applied.bob.r1": "alw",
    f"{V1}stored.event.bob.r1": "w",
    f"{V1}stored.report.alice.r1.node-a": "w",
    f"{V1}stored.report.bob.r1.node-b": "w",
    f"{V1}stored.window.bob.r1.node-b": "w",
    f"{V1}stored.state.bob.r1.node-b": "alw",
    f"{V1}live.trainer.t": "w",
    f"{V1}live.collector.node-a": "cw",
    f"{V1}live.collector.node-b": "w",
    f"{V1}live.reward.1": "rw",
    f"{V1}live.arbitrator.a": "aw",
    f"{V1}stored.action.*.r1": "lw",
    f"{V1}stored.>": "w",
    f"{V1}live.*.*": "w",
    **dict.fromkeys((f"{V1}action.>", f"{V1}job.*.*", f"{V1}>", ">", "$JS.API.>", "$JS.ACK.>", "$SYS.>"), ""),
    **dict.fromkeys(("$SRV.PING", "_INBOX.>", "_INBOX.bob.>", "_R_.>"), ""),
}


def may(table: dict[str, str], role: str) -> set[str]:
    return {subject for subject, letters in table.items() if LETTERS[role] in letters}


@pytest.mark.parametrize("role", LETTERS)
async def test_a_key_may_do_what_the_table_says_and_nothing_else(broker: DeployedBroker, role: str) -> None:
    async with raw_client(broker.settings(role)) as client:
        for subject in PUBLISH:
            await client.send(subject)
        await client.settle()
        await client.hear(*HEAR)
        refused = client.refused
    assert {subject for subject in PUBLISH if ("publish", subject.lower()) not in refused} == may(PUBLISH, role)
    assert {subject for subject in HEAR if ("subscription", subject.lower()) not in refused} == may(HEAR, role)


async def test_provision_may_manage_streams_and_publish_as_nobody(broker: DeployedBroker) -> None:
    assert {*LETTERS, "provision"} == set(ROLES)
    theirs = [subject for subject in PUBLISH if not subject.startswith((API, f"{V1}profile."))]
    async with raw_client(broker.settings("provision")) as client:
        for subject in theirs:
            await client.send(subject)
        await client.settle()
        assert {subject for _, subject in client.refused} == {subject.lower() for subject in theirs}


@pytest.fixture
async def provision(broker: DeployedBroker) -> AsyncIterator[RawClient]:
    """In the account of the streams."""
    async with raw_client(broker.settings("provision")) as client:
        yield client


async def num_messages(provision: RawClient) -> dict[str, int]:
    found = [json.loads((await provision.ask(f"{API}STREAM.INFO.{name}")).data) for name in NAMES]
    return {one["config"]["name"]: one["state"]["last_seq"] for one in found}


STEERED = [
    f"{V1}action.bob.r1",
    f"{V1}report.bob.r1.node-a",
    f"{V1}job.bob.r1",
    f"{API}STREAM.PURGE.REPORTS",
    f"{API}STREAM.DELETE.JOBS",
    f"{API}CONSUMER.DELETE.REPORTS.collector-node-a",
    f"{API}CONSUMER.RESET.REPORTS.collector-node-a",
    "$JS.ACK.REPORTS.collector-node-a.1.1.1.1.1",
]
"""Where a hostile client would have JetStream's answers go."""


@pytest.mark.parametrize("role", LETTERS)
async def test_an_answer_is_never_stored_nor_carried_out(
    broker: DeployedBroker, provision: RawClient, role: str
) -> None:
    """The rights of an answer are the server's: nothing is refused or logged, but it stays in the key's own account."""
    async with raw_client(broker.settings("trainer")) as trainer:
        await trainer.ask(f"{V1}report.alice.r1.node-a", b"a")
        await trainer.ask(f"{V1}job.alice.r1", b"b")
    asked = [one for one in may(PUBLISH, role) if not one.startswith(f"{V1}live")]
    async with raw_client(broker.settings(role)) as client:
        before = await num_messages(provision)
        for subject in asked:
            await client.send(subject, b"" if subject.startswith(V1) else b'{"seq":1}', reply=STEERED[0])
        await client.settle()
        first = await num_messages(provision)
        for reply in STEERED[1:]:
            for subject in asked:
                await client.send(subject, b"" if subject.startswith(V1) else b'{"seq":1}', reply=reply)
        await client.settle()
        assert client.refused == set()
    after = await num_messages(provision)
    sent = len([subject for subject in asked if subject.startswith(V1)])
    assert sum(first.values()) - sum(before.values()) == sent, "what was published, and nothing else"
    # a message whose reply is an acknowledgement is not stored at all
    assert {name: after[name] - first[name] for name in NAMES} == {
        name: (first[name] - before[name]) * (len(STEERED) - 2) for name in NAMES
    }
    durable = json.loads((await provision.ask(f"{API}CONSUMER.INFO.REPORTS.collector-node-a")).data)
    assert "error" not in durable


async def test_a_reader_of_actions_ignores_an_answer_that_another_trainer_sends_to_it(broker: DeployedBroker) -> None:
    """The broker cannot keep a trainer from it: readers refuse messages without exactly the headers they follow."""
    subject, forged = f"{V1}job.alice.r9", {"Nats-Stream": "ACTIONS", "Nats-Subject": f"{V1}action.bob.r1"}
    bob = await Bus.connect(broker.key("bob", "--role", "trainer", "--job", "bob"), name="test-1")
    heard: list[bytes] = []
    await bob._connection.subscribe(f"{V1}stored.action.bob.r1", lambda *message: heard.append(message[3] or b""))
    async with (
        bob.follow("ACTIONS", f"{V1}action.bob.r1") as actions,
        raw_client(broker.settings("trainer")) as alice,
        raw_client(broker.settings("arbitrator")) as arbitrator,
    ):
        await bob._connection.round_trip(30)
        await alice.ask(subject, b"a forged action", **forged)
        await alice.send(f"{API}DIRECT.GET.JOBS.{subject}", reply=f"{V1}stored.action.bob.r1")
        await alice.settle()
        await until(lambda: heard)
        await arbitrator.ask(f"{V1}action.bob.r1", b"a real action")
        assert (await anext(actions)).payload == b"a real action"
    assert b"Nats-Stream: JOBS\r\nNats-Subject: dynamix.v1.job.alice.r9\r\n" in heard[0]
    await bob.close()


async def test_a_key_for_two_names_is_for_all_runs_of_both(broker: DeployedBroker) -> None:
    settings = broker.key("two", "--role", "trainer", "--job", "carol", "--job", "dave")
    async with raw_client(settings) as client:
        for name in ("carol", "dave"):
            for run in ("r1", "r2", "_"):
                await client.ask(f"{V1}report.{name}.{run}.node-a", b"x")
        await client.send(f"{V1}report.erin.r1.node-a")
        await client.settle()
        assert client.refused == {("publish", f"{V1}report.erin.r1.node-a")}


async def test_trainers_and_services_receive_each_others_messages_once(broker: DeployedBroker) -> None:
    async with (
        raw_client(broker.settings("trainer")) as trainer,
        raw_client(broker.settings("collector")) as collector,
        raw_client(broker.settings("arbitrator")) as arbitrator,
        raw_client(broker.settings("watcher")) as watcher,
    ):
        await trainer.hear(f"{V1}trace.alice.*.*", f"{V1}stored.action.alice.*")
        await watcher.hear(f"{V1}live.*.*", f"{V1}stored.action.>")
        await collector.ask(f"{V1}trace.alice.r1.node-a", b"trace")
        await arbitrator.ask(f"{V1}action.alice.r1", b"action")
        await trainer.send(f"{V1}live.trainer.t", b"live")
        for client in (collector, arbitrator, trainer, watcher):
            await client.settle()
    assert [(m.subject, m.data) for m in trainer.heard] == [
        (f"{V1}trace.alice.r1.node-a", b"trace"),
        (f"{V1}stored.action.alice.r1", b"action"),
    ]
    assert [m.subject for m in watcher.heard] == [f"{V1}stored.action.alice.r1", f"{V1}live.trainer.t"]


async def test_a_trainer_beyond_its_limits_is_cut_off(broker: DeployedBroker) -> None:
    """Limits of subscriptions, and of bytes of a message: the largest one passes."""
    async with raw_client(broker.settings("trainer")) as client:
        await client.hear(*(f"{client.inbox}.{number}" for number in range(MAX_SUBSCRIPTIONS["trainer"])))
        assert client.errors == []
        await client.client.subscribe(f"{client.inbox}.one-more")
        await until(lambda: client.client.is_closed)
    async with raw_client(broker.settings("trainer")) as client:
        await client.ask(f"{V1}report.alice.r1.node-a", bytes(MAX_TRAINER_BYTES), **{"Nats-Msg-Id": "x" * 200})
        await client.send(f"{V1}report.alice.r1.node-a", bytes(2 * MAX_TRAINER_BYTES))
        await until(lambda: client.client.is_closed)
