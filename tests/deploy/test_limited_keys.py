"""A hostile client with a key for one job, or one node, tries every operation of the table on the real broker."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from tests.support import examples
from tests.support.brokers import connected, consumer_names
from tests.support.deployed_broker import DeployedBroker, deployed_broker
from tests.support.hostile import api_operations, is_heard, refused, send_answers_to, subjects_of_kind

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.broker.errors import ApiError
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode, message_id
from dynamix.schemas.kinds import KINDS, Kind
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

MINE, OTHERS, QUIET = examples.JOB, "other-1", "quiet-1"
NODE, OTHER_NODE = "node-a", "node-b"
HARMLESS = {"$SYS.REQ.USER.INFO"}
"""The server answers it to every user, about itself."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        running.key("mallory", "--role", "trainer", "--job", MINE)
        running.key("node-a", "--role", "collector", "--node", NODE)
        running.reload()
        yield running


@pytest.fixture
async def operator(broker: DeployedBroker) -> AsyncIterator[Bus]:
    async with connected(broker.settings("provision"), "provision-1") as bus:
        await provision(bus)
        yield bus


@pytest.fixture
async def trainer(broker: DeployedBroker, operator: Bus) -> AsyncIterator[Bus]:
    """With the key of job `MINE`."""
    assert operator.is_connected
    async with connected(broker.with_key("mallory"), "trainer-1") as bus:
        yield bus


@pytest.fixture
async def collector(broker: DeployedBroker, operator: Bus) -> AsyncIterator[Bus]:
    """With the key of node `NODE`."""
    assert operator.is_connected
    async with connected(broker.with_key("node-a"), "collector-1") as bus:
        yield bus


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_trainer_publishes_of_its_own_job_what_a_trainer_sends_and_nothing_of_anothers(
    trainer: Bus, kind: Kind
) -> None:
    own = list(subjects_of_kind(kind, {"job": (MINE,), "service": ("trainer",)}))
    others = list(subjects_of_kind(kind, {"job": (OTHERS, "*", ">"), "service": ("arbitrator",)}))
    sends = "trainer" in kind.senders
    assert await refused(trainer, *own) == [not sends] * len(own)
    assert await refused(trainer, *others) == [True] * len(others)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_trainer_hears_and_looks_up_of_its_own_job_only(trainer: Bus, kind: Kind) -> None:
    for job in (MINE, OTHERS, "*"):
        place = {"job": (job,), "service": ("trainer" if job == MINE else "arbitrator",)}
        for subject in subjects_of_kind(kind, place):
            heard = job == MINE and kind.name in ("reward", "trace", "live")
            assert await is_heard(trainer, subject) == heard, subject
            stored = job == MINE and kind.name == "action"
            assert await is_heard(trainer, subjects.announced(subject)) == stored, subject
            looked_up = job == MINE and kind.name in ("job", "action")
            if kind.stream is None:
                continue
            assert await refused(trainer, f"$JS.API.DIRECT.GET.{kind.stream.name}.{subject}") == [not looked_up], (
                subject
            )


async def test_a_trainer_is_refused_every_other_operation_of_jetstream_and_of_the_server(trainer: Bus) -> None:
    operations = [operation for operation in api_operations() if operation not in HARMLESS]
    allowed = [one for one, no in zip(operations, await refused(trainer, *operations), strict=True) if not no]
    assert allowed == []


FORGED = encode(examples.job({"node-a": (0, 1)}, job=OTHERS, phase="ended"))
LISTENING = b'{"stream_name": "FEED", "config": {"name": "mallory", "deliver_subject": "_INBOX.mallory.all"}}'
ANSWERS_TO = {
    **dict.fromkeys((f"dynamix.v1.{kind}.{OTHERS}" for kind in ("job", "action", "applied")), FORGED),
    **dict.fromkeys((f"dynamix.v1.{kind}.{OTHERS}.{NODE}" for kind in ("report", "window", "state", "reward")), FORGED),
    **dict.fromkeys((f"$JS.API.STREAM.{what}.FEED" for what in ("PURGE", "DELETE")), b""),
    "$JS.API.CONSUMER.CREATE.FEED.mallory.dynamix.v1.report.>": LISTENING,
    "$JS.API.CONSUMER.DELETE.FEED.collector-node-b": b"",
}
"""Where a hostile trainer would have JetStream send its answers, and with what."""


async def stored(operator: Bus) -> dict[str, tuple[int, int]]:
    """The last sequence of each stream but JOBS, and its consumers; and of the other job how much there is of it."""
    states = {name: await operator.stream_state(name) for name in ("FEED", "ACTIONS", "DEAD", "PROFILES")}
    found = {name: (state.num_messages, state.num_consumers) for name, state in states.items()}
    others = await operator.last(JOBS.name, f"dynamix.v1.job.{OTHERS}")
    return {**found, "other": (0 if others is None else others.sequence, 0)}


@pytest.mark.parametrize("subject", ANSWERS_TO)
async def test_no_answer_to_a_trainer_is_stored_or_carried_out_as_anothers(
    trainer: Bus, operator: Bus, subject: str
) -> None:
    """JetStream answers wherever a request says, with rights of its own: but only within the trainer's account."""
    await operator.purge(FEED.name, f"dynamix.v1.applied.{MINE}")
    before = await stored(operator)
    await send_answers_to(trainer, subject, ANSWERS_TO[subject], MINE)
    sent = {"FEED": (before["FEED"][0] + 1, before["FEED"][1])}  # the receipt of its own job
    await until_stored(operator, sent["FEED"])
    assert await stored(operator) == before | sent


async def test_within_one_account_such_answers_are_stored(broker: DeployedBroker, operator: Bus) -> None:
    """As users with a password are: the attempts above would be noticed."""
    async with connected(broker.settings("trainer"), "trainer-1") as shared:
        await send_answers_to(shared, f"dynamix.v1.action.{OTHERS}", FORGED, MINE)
        await until_found(operator, f"dynamix.v1.action.{OTHERS}")


async def until_stored(operator: Bus, wanted: tuple[int, int]) -> None:
    async with asyncio.timeout(30):
        while (await stored(operator))["FEED"] != wanted:  # noqa: ASYNC110 - what an operator would do
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)  # what else there is would have come by now


async def until_found(operator: Bus, subject: str) -> None:
    async with asyncio.timeout(30):
        while await operator.last(ACTIONS.name, subject) is None:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.05)


async def test_a_trainer_hears_nothing_by_a_wildcard(trainer: Bus) -> None:
    for subject in (">", "*", "dynamix.>", "dynamix.v1.*.*", "$JS.>", "$SYS.>", "$SRV.>", "_INBOX.>", "_INBOX.*.>"):
        assert not await is_heard(trainer, subject), subject


async def test_a_collector_publishes_for_its_own_node_only(collector: Bus) -> None:
    for kind in KINDS:
        for node in (NODE, OTHER_NODE):
            place = {"job": (MINE,), "node": (node,), "service": ("collector",), "instance": (node,)}
            own = node == NODE or not {"node", "instance"} & set(kind.tokens)
            for subject in subjects_of_kind(kind, place):
                assert await refused(collector, subject) == [not ("collector" in kind.senders and own)], subject


async def test_a_collector_reads_reports_of_its_own_node_only_and_by_one_consumer(
    collector: Bus, trainer: Bus, operator: Bus
) -> None:
    own, other = (f"dynamix.v1.report.*.{node}" for node in (NODE, OTHER_NODE))
    name = collector._connection.durable_named(f"collector-{NODE}")
    create = "dynamix.api.CONSUMER.CREATE.FEED"
    wrong = [
        f"{create}.collector-{OTHER_NODE}.{own}",
        f"{create}.collector-{NODE}.{own}",
        f"{create}.{name}.{other}",
        f"{create}.{name}.dynamix.v1.report.>",
        f"{create}.{name}.dynamix.v1.state.*.{NODE}",
        f"{create}.{name}",
        f"{create}.mine.{own}",
        f"dynamix.api.CONSUMER.MSG.NEXT.FEED.collector-{OTHER_NODE}",
        f"dynamix.api.CONSUMER.DELETE.FEED.{name}",
        f"$JS.API.CONSUMER.MSG.NEXT.FEED.{name}",
        f"$JS.ACK.FEED.collector-{OTHER_NODE}.1.1.1.1.1",
        f"$JS.ACK.FEED.collector-{OTHER_NODE}.FEED.{name}.1.1.1",
    ]
    assert await refused(collector, *wrong) == [True] * len(wrong)
    before = collector.counters["permission_denials"]
    async with collector.consume(FEED.name, [own], start="new", durable=f"collector-{NODE}") as reports:
        await trainer.publish(examples.report(node=NODE, window=3))
        batch = await anext(reports)
        assert batch[0].payload == encode(examples.report(node=NODE, window=3))
        await reports.ack(batch[-1])
    assert await consumer_names(operator, FEED.name) == [name]
    assert collector.counters["permission_denials"] == before


async def test_a_consumer_with_another_filter_than_its_subject_says_is_not_made(collector: Bus, operator: Bus) -> None:
    """The permission is for the request's subject; the server compares it with what the request asks for."""
    own, name = f"dynamix.v1.report.*.{NODE}", collector._connection.durable_named(f"collector-{NODE}")
    before = await consumer_names(operator, FEED.name)
    for config in (
        {"name": name, "filter_subject": "dynamix.v1.>"},
        {"durable_name": "other", "filter_subject": own},
        {"name": name, "filter_subjects": ["dynamix.v1.state.>"]},
    ):
        body = {"stream_name": FEED.name, "action": "create", "config": {"ack_policy": "all", **config}}
        with pytest.raises(ApiError, match=r"filter|name|subject"):
            await collector.requests.ask(f"CONSUMER.CREATE.FEED.{name}.{own}", body, Answer)
    assert await consumer_names(operator, FEED.name) == before


async def test_forged_messages_of_another_job_change_nothing(
    trainer: Bus, operator: Bus, broker: DeployedBroker
) -> None:
    """A receipt, an end and a generation made up for another's job."""
    honest = examples.job(job=OTHERS)
    async with connected(broker.settings("trainer"), "trainer-2") as victim:
        await victim.publish(honest)
    forged = [
        examples.job(job=OTHERS, phase="ended"),
        examples.job(job=OTHERS, generation=1_000_000),
    ]
    for message in forged:
        assert await refused(trainer, subjects.of("job", OTHERS), payload=encode(message)) == [True]
    assert await refused(trainer, subjects.of("applied", OTHERS)) == [True]
    stored = await operator.last(JOBS.name, subjects.of("job", OTHERS))
    assert stored is not None
    assert stored.payload == encode(honest)


async def test_a_thousand_consumers_are_refused_and_none_is_made(trainer: Bus, operator: Bus) -> None:
    create = f"$JS.API.CONSUMER.CREATE.{ACTIONS.name}"
    wanted = subjects.of("action", MINE)
    before = trainer.counters["permission_denials"]
    for number in range(1000):
        await trainer._connection.send(f"{create}.flood-{number}.{wanted}", b"{}")
    await trainer._connection.round_trip(30.0)
    assert trainer.counters["permission_denials"] - before == 1000
    assert await consumer_names(operator, ACTIONS.name) == []


async def test_a_flood_of_specifications_leaves_one_of_its_own_job_and_all_others(
    trainer: Bus, operator: Bus, broker: DeployedBroker
) -> None:
    honest = examples.job(job="honest-1")
    async with connected(broker.settings("trainer"), "trainer-2") as victim:
        await victim.publish(honest)
    for number in range(300):  # more than JOBS holds, were they of different jobs
        await trainer.publish_bytes(subjects.of("job", MINE), bytes(250 * 1024), f"flood-{number}")
    assert await refused(trainer, *(subjects.of("job", f"flood-{number}") for number in range(150))) == [True] * 150
    stored = await operator.last(JOBS.name, subjects.of("job", "honest-1"))
    assert stored is not None
    assert stored.payload == encode(honest)


async def test_what_the_broker_refused_is_in_its_log_with_user_and_subject(
    trainer: Bus, broker: DeployedBroker
) -> None:
    await refused(trainer, subjects.of("action", "logged-1"))
    lines = [line for line in broker.log.read_text().splitlines() if subjects.of("action", "logged-1") in line]
    assert len(lines) == 1
    assert "Publish Violation" in lines[0]


async def test_no_message_is_dropped_as_a_duplicate_of_a_hostile_one(
    trainer: Bus, collector: Bus, operator: Bus, broker: DeployedBroker
) -> None:
    """A stream compares the identities of all messages: who guesses one could have stored another with it before."""
    report = examples.report(NODE, (0,), 7, job=QUIET)
    state = msgspec.structs.replace(examples.state(NODE, (0,), 7), job=QUIET)
    job = examples.job({"node-a": (0,)}, job=QUIET)
    for message, own in (
        (report, subjects.of("report", MINE, NODE)),
        (state, subjects.of("report", MINE, NODE)),
        (job, subjects.of("job", MINE)),
    ):
        header = {"Nats-Msg-Id": message_id(message)}
        assert await trainer._connection.send(own, b"junk", f"{trainer._connection.inbox}.x", header)
    await trainer._connection.round_trip(30.0)
    async with connected(broker.settings("trainer"), "trainer-2") as victim:
        await victim.publish(job)
        await victim.publish(report)
        assert victim.counters["duplicates"] == 0
        await victim.publish(report)
        assert victim.counters["duplicates"] == 1, "its own are dropped"
    await collector.publish(state)
    assert collector.counters["duplicates"] == 0
    for stream, message in ((JOBS, job), (FEED, report), (FEED, state)):
        stored = await operator.last(stream.name, subjects.subject_of(message))
        assert stored is not None
        assert stored.payload == encode(message)
