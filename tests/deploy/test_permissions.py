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
OWN, OTHER = ("alice.r1", "node-a", "1"), ("bob.r1", "node-b", "2")
"""Job, node and instance of the keys, and others."""
NAMES = [stream.name for stream in STREAMS]
_ANY_JOB = ("alice.r1", "bob.r1")
_ANY_NODE = [f"{job}.{node}" for job in _ANY_JOB for node in ("node-a", "node-b")]


def subjects_for(job: str, node: str, instance: str) -> list[str]:
    """All that anybody publishes, and all that JetStream answers, for a job, a node and an instance."""
    of_a_job = [f"{V1}{kind}.{job}" for kind in ("job", "action", "applied", "event", "dead.report")]
    live = [f"{V1}live.collector.{node}", f"{V1}live.reward.{instance}"]
    direct = [f"{API}DIRECT.GET.{stream}.{V1}{kind}.{job}" for stream, kind in (("JOBS", "job"), ("ACTIONS", "action"))]
    durables = [f"{stream}.{durable}" for stream in ("FEED", "JOBS") for durable in consumers(node, instance)]
    asked = [f"{API}CONSUMER.{verb}.{one}" for verb in ("INFO", "MSG.NEXT", "RESET") for one in durables]
    acks = [f"{ack}.{one}.1.1.1.1.1" for ack in ("$JS.ACK", "$JS.ACK._.acc") for one in durables]
    return [*of_a_job, *live, *direct, *asked, *acks]


def consumers(node: str, instance: str) -> tuple[str, str]:
    return f"collector-{node}", f"reward-{instance}"


ANYBODYS = [
    *(f"{V1}{kind}.{place}" for kind in ("report", "window", "state", "trace", "reward") for place in _ANY_NODE),
    *(f"{V1}live.{service}" for service in ("trainer.t", "arbitrator.a", "learner.l")),
    f"{V1}policy.p",
    f"{V1}profile.f",
    *(f"{API}{verb}.{name}" for verb in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET") for name in NAMES),
    f"{API}INFO",
]
FORBIDDEN_VERBS = ["CREATE", "UPDATE", "DELETE", "MSG.DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE"]
FORBIDDEN_CONSUMER_VERBS = ["DELETE", "PAUSE", "UNPIN", "LEADER.STEPDOWN", "DURABLE.CREATE"]
FORBIDDEN = [
    *(f"{API}STREAM.{verb}.{name}" for name in NAMES for verb in FORBIDDEN_VERBS),
    *(f"{API}STREAM.PURGE.{name}" for name in NAMES),
    *(f"{API}CONSUMER.{verb}.{name}" for name in NAMES for verb in ("CREATE", "LIST", "NAMES")),
    *(f"{API}CONSUMER.CREATE.{name}.x" for name in NAMES),
    *(f"{API}CONSUMER.CREATE.{name}.x.{V1}report.alice.r1.node-a" for name in NAMES),
    *(f"{API}CONSUMER.{verb}.{name}.collector-node-a" for name in NAMES for verb in FORBIDDEN_CONSUMER_VERBS),
    *(f"{API}STREAM.{verb}" for verb in ("LIST", "NAMES", "TEMPLATE.CREATE.x")),
    *(f"{API}{verb}" for verb in ("SERVER.REMOVE", "META.LEADER.STEPDOWN", "ACCOUNT.PURGE.streams")),
    *(f"{V1}stored.action.{job}" for job in _ANY_JOB),
    "_INBOX.bob.x",
    "_R_.x",
    "$SRV.PING",
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.REQ.SERVER.PING",
    "dynamix.v2.anything",
    "anything",
]
"""No key of a trainer, a service or a watcher may; `provision` makes and removes streams and consumers."""
ALL = [*subjects_for(*OWN), *subjects_for(*OTHER), *ANYBODYS, *FORBIDDEN]

_DEAD = [f"{V1}dead.report.{job}" for job in _ANY_JOB]


def _durable(name: str) -> set[str]:
    asked = {f"{API}CONSUMER.{verb}.FEED.{name}" for verb in ("INFO", "MSG.NEXT", "RESET")}
    return asked | {f"{ack}.FEED.{name}.1.1.1.1.1" for ack in ("$JS.ACK", "$JS.ACK._.acc")}


def _reads(*streams: str) -> set[str]:
    return {f"{API}{verb}.{name}" for verb in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET") for name in streams}


MAY_PUBLISH = {
    "trainer": {
        *(f"{V1}{kind}.alice.r1" for kind in ("job", "applied", "dead.report")),
        f"{V1}report.alice.r1.node-a",
        f"{V1}report.alice.r1.node-b",
        f"{V1}live.trainer.t",
        f"{API}DIRECT.GET.JOBS.{V1}job.alice.r1",
        f"{API}DIRECT.GET.ACTIONS.{V1}action.alice.r1",
    },
    "collector": {
        *(f"{V1}{kind}.{job}.node-a" for kind in ("window", "state", "trace") for job in _ANY_JOB),
        *_DEAD,
        f"{V1}live.collector.node-a",
        f"{API}STREAM.INFO.FEED",
        *_durable("collector-node-a"),
    },
    "reward": {
        *(f"{V1}reward.{place}" for place in _ANY_NODE),
        *_DEAD,
        f"{V1}live.reward.1",
        f"{API}STREAM.INFO.FEED",
        *_durable("reward-1"),
    },
    "arbitrator": {
        *(f"{V1}{kind}.{job}" for kind in ("action", "event") for job in _ANY_JOB),
        *_DEAD,
        f"{V1}live.arbitrator.a",
        f"{V1}profile.f",
        f"{API}INFO",
        f"{API}STREAM.INFO.DEAD",
        *_reads("JOBS", "FEED", "ACTIONS", "PROFILES", "POLICIES"),
    },
    "learner": {
        *(f"{V1}event.{job}" for job in _ANY_JOB),
        *_DEAD,
        f"{V1}live.learner.l",
        f"{V1}policy.p",
        *_reads("JOBS", "FEED", "ACTIONS", "POLICIES"),
    },
    "watcher": {f"{API}INFO", *_reads(*NAMES)},
}
HEARABLE = [
    *(f"{V1}{kind}.{job}.{node}" for kind in ("reward", "trace", "report") for job, node, _ in (OWN, OTHER)),
    *(f"{V1}stored.{kind}.{job}" for kind in ("job", "action", "applied", "event") for job, _, _ in (OWN, OTHER)),
    *(f"{V1}stored.{kind}.{job}.{node}" for kind in ("report", "window", "state") for job, node, _ in (OWN, OTHER)),
    *(f"{V1}live.{live}" for live in ("trainer.t", "collector.node-a", "collector.node-b", "reward.1", "arbitrator.a")),
    *(f"{V1}{wild}" for wild in ("action.>", "job.*.*", "stored.action.*.r1", "stored.>", "live.*.*", ">")),
    *(">", "$JS.API.>", "$JS.ACK.>", "$SYS.>", "$SRV.PING", "_INBOX.>", "_INBOX.bob.>", "_R_.>"),
]
MAY_HEAR = {
    "trainer": {f"{V1}reward.alice.r1.node-a", f"{V1}trace.alice.r1.node-a", f"{V1}stored.action.alice.r1"},
    "collector": {f"{V1}stored.report.alice.r1.node-a", f"{V1}live.collector.node-a"},
    "reward": {f"{V1}stored.window.{job}.{node}" for job, node, _ in (OWN, OTHER)} | {f"{V1}live.reward.1"},
    "arbitrator": {
        *(f"{V1}stored.{kind}.{job}" for kind in ("job", "applied") for job in _ANY_JOB),
        *(f"{V1}stored.state.{job}.{node}" for job, node, _ in (OWN, OTHER)),
        f"{V1}live.arbitrator.a",
    },
    "learner": {
        *(f"{V1}stored.{kind}.{job}" for kind in ("job", "action", "applied") for job in _ANY_JOB),
        *(f"{V1}stored.state.{job}.{node}" for job, node, _ in (OWN, OTHER)),
        f"{V1}stored.action.*.r1",
    },
    "watcher": {subject for subject in HEARABLE if subject.startswith((f"{V1}stored.", f"{V1}live."))},
}
TESTED = tuple(MAY_PUBLISH)


@pytest.mark.parametrize("role", TESTED)
async def test_a_key_may_publish_and_ask_what_the_table_says_and_nothing_else(
    broker: DeployedBroker, role: str
) -> None:
    async with raw_client(broker.settings(role)) as client:
        for subject in ALL:
            await client.send(subject)
        await client.settle()
        refused = {subject for verb, subject in client.refused if verb == "publish"}
    assert {subject for subject in ALL if subject.lower() not in refused} == MAY_PUBLISH[role]


@pytest.mark.parametrize("role", TESTED)
async def test_a_key_may_listen_to_what_the_table_says_and_nothing_else(broker: DeployedBroker, role: str) -> None:
    async with raw_client(broker.settings(role)) as client:
        await client.hear(*HEARABLE)
        refused = {subject for verb, subject in client.refused if verb == "subscription"}
    assert {subject for subject in HEARABLE if subject.lower() not in refused} == MAY_HEAR[role]


async def test_provision_may_not_speak_for_anybody(broker: DeployedBroker) -> None:
    theirs = [subject for subject in ALL if not subject.startswith((API, f"{V1}profile."))]
    async with raw_client(broker.settings("provision")) as client:
        for subject in theirs:
            await client.send(subject)
        await client.settle()
        assert {subject for _, subject in client.refused} == {subject.lower() for subject in theirs}


def test_the_table_has_every_role() -> None:
    assert {*TESTED, "provision"} == set(ROLES)


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
    f"{API}STREAM.PURGE.FEED",
    f"{API}STREAM.DELETE.JOBS",
    f"{API}CONSUMER.DELETE.FEED.collector-node-a",
    f"{API}CONSUMER.RESET.FEED.collector-node-a",
    "$JS.ACK.FEED.collector-node-a.1.1.1.1.1",
]
"""Where a hostile client would have JetStream's answers go."""


@pytest.mark.parametrize("role", TESTED)
async def test_an_answer_is_never_stored_nor_carried_out(
    broker: DeployedBroker, provision: RawClient, role: str
) -> None:
    """The rights of an answer are the server's: nothing is refused or logged, but it stays in the key's own account."""
    stored = f"{V1}report.alice.r1.node-a"
    async with raw_client(broker.settings("trainer")) as trainer:
        await trainer.ask(stored, b"a")
        await trainer.ask(f"{V1}job.alice.r1", b"b")
    asked = [one for one in MAY_PUBLISH[role] if not one.startswith(f"{V1}live")]
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
    # what has an acknowledgement for its reply is not stored at all
    assert {name: after[name] - first[name] for name in NAMES} == {
        name: (first[name] - before[name]) * (len(STEERED) - 2) for name in NAMES
    }
    durable = json.loads((await provision.ask(f"{API}CONSUMER.INFO.FEED.collector-node-a")).data)
    assert "error" not in durable


async def forge_action(broker: DeployedBroker) -> None:
    """As alice, let JetStream send a message of alice's own to where bob hears actions, with headers like those."""
    subject, forged = f"{V1}job.alice.r9", {"Nats-Stream": "ACTIONS", "Nats-Subject": f"{V1}action.bob.r1"}
    async with raw_client(broker.settings("trainer")) as alice:
        await alice.ask(subject, b"a forged action", **forged)
        await alice.send(f"{API}DIRECT.GET.JOBS.{subject}", reply=f"{V1}stored.action.bob.r1")
        await alice.settle()


@pytest.fixture
async def bob(broker: DeployedBroker) -> AsyncIterator[Bus]:
    settings = broker.settings("bob")
    if not broker.credential("bob").exists():
        broker.key("bob", "--role", "trainer", "--job", "bob")
    bus = await Bus.connect(settings, name="test-1")
    yield bus
    await bus.close()


async def test_an_answer_that_is_sent_to_another_trainer_says_what_it_is(broker: DeployedBroker, bob: Bus) -> None:
    """The broker cannot keep a trainer from it: readers refuse what has not exactly the headers that they follow."""
    heard: list[bytes] = []
    await bob._connection.subscribe(f"{V1}stored.action.bob.r1", lambda *message: heard.append(message[3] or b""))
    await bob._connection.round_trip(2)
    await forge_action(broker)
    await bob._connection.round_trip(2)
    (headers,) = heard
    assert headers.count(b"Nats-Stream:") == headers.count(b"Nats-Subject:") == 2
    assert b"Nats-Stream: JOBS\r\nNats-Subject: dynamix.v1.job.alice.r9\r\n" in headers


async def test_who_follows_actions_does_not_take_an_answer_for_one(broker: DeployedBroker, bob: Bus) -> None:
    async with bob.follow("ACTIONS", f"{V1}action.bob.r1") as actions:
        await bob._connection.round_trip(2)
        await forge_action(broker)
        async with raw_client(broker.settings("arbitrator")) as arbitrator:
            await arbitrator.ask(f"{V1}action.bob.r1", b"a real action")
        assert (await anext(actions)).payload == b"a real action"


async def test_a_key_for_two_names_is_for_all_runs_of_both(broker: DeployedBroker) -> None:
    settings = broker.key("two", "--role", "trainer", "--job", "carol", "--job", "dave")
    async with raw_client(settings) as client:
        for name in ("carol", "dave"):
            for run in ("r1", "r2", "_"):
                await client.ask(f"{V1}report.{name}.{run}.node-a", b"x")
        await client.send(f"{V1}report.erin.r1.node-a")
        await client.settle()
        assert client.refused == {("publish", f"{V1}report.erin.r1.node-a")}


async def test_what_trainers_and_services_hear_of_each_other_comes_once(broker: DeployedBroker) -> None:
    async with (
        raw_client(broker.settings("trainer")) as trainer,
        raw_client(broker.settings("reward")) as reward,
        raw_client(broker.settings("arbitrator")) as arbitrator,
        raw_client(broker.settings("watcher")) as watcher,
    ):
        await trainer.hear(f"{V1}reward.alice.*.*", f"{V1}stored.action.alice.*")
        await watcher.hear(f"{V1}live.*.*", f"{V1}stored.action.>")
        await reward.ask(f"{V1}reward.alice.r1.node-a", b"reward")
        await arbitrator.ask(f"{V1}action.alice.r1", b"action")
        await trainer.send(f"{V1}live.trainer.t", b"live")
        for client in (reward, arbitrator, trainer, watcher):
            await client.settle()
    assert [(m.subject, m.data) for m in trainer.heard] == [
        (f"{V1}reward.alice.r1.node-a", b"reward"),
        (f"{V1}stored.action.alice.r1", b"action"),
    ]
    assert [m.subject for m in watcher.heard] == [f"{V1}stored.action.alice.r1", f"{V1}live.trainer.t"]
    assert trainer.heard[1].headers is not None
    assert trainer.heard[1].headers["Nats-Stream"] == "ACTIONS"


async def test_a_trainer_with_more_subscriptions_than_it_needs_is_cut_off(broker: DeployedBroker) -> None:
    async with raw_client(broker.settings("trainer")) as client:
        await client.hear(*(f"{client.inbox}.{number}" for number in range(MAX_SUBSCRIPTIONS["trainer"])))
        assert client.errors == []
        await client.client.subscribe(f"{client.inbox}.one-more")
        await until(lambda: client.client.is_closed)


async def test_the_largest_message_of_a_trainer_passes_and_a_larger_one_cuts_it_off(broker: DeployedBroker) -> None:
    async with raw_client(broker.settings("trainer")) as client:
        await client.ask(f"{V1}report.alice.r1.node-a", bytes(MAX_TRAINER_BYTES), **{"Nats-Msg-Id": "x" * 200})
        await client.send(f"{V1}report.alice.r1.node-a", bytes(2 * MAX_TRAINER_BYTES))
        await until(lambda: client.client.is_closed)
