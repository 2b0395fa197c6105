"""What each user of deploy/users/users.conf may do, tried on the real server: its own work, and nothing else."""

import asyncio
import json
import urllib.request
from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.deployed_broker import USERS, DeployedBroker

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.bus.objects.layout import description_subject
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.streams.stored import write_stream
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.kinds import BY_NAME, KINDS, WATCHER
from dynamix.schemas.messages import (
    Applied,
    Dead,
    Event,
    Message,
    PolicyVersion,
    RankReward,
    Reward,
)
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, POLICIES, STREAMS, Stream

STORED = [kind for kind in KINDS if kind.stream is not None]
MAY_PUBLISH = {kind.name: set(kind.senders) for kind in STORED}
MAY_PUBLISH["profile"].add("provision")  # it forgets families
MAY_READ = {kind.name: {*kind.receivers, WATCHER} for kind in STORED}
for _name in ("report", "window", "trace", "policy", "event"):
    MAY_READ[_name].add("learner")  # its one consumer of FEED has several filters, which permissions cannot limit

for _name in ("reward", "trace", "action"):
    MAY_READ[_name].discard("trainer")  # it hears them, and may read no stream


def message(kind: str, job: str = examples.JOB) -> Message:
    """A message of a kind, of a job."""
    where: dict[str, Any] = {"job": job, "generation": 0, "window": 0, "node": "node-a"}
    made_up: dict[str, Message] = {
        "job": examples.job(job=job),
        "report": examples.report(job=job),
        "window": examples.window(job=job),
        "state": msgspec.structs.replace(examples.state(), job=job),
        "reward": Reward(**where, formula="paper-sgd", ranks=(RankReward(rank=0, reward=1.0, terms={"alpha": 1.0}),)),
        "action": examples.action(job=job, hash=bytes(32)),
        "applied": Applied(
            job=job,
            generation=0,
            decided_window=0,
            effective_window=2,
            effective_step=40,
            local_batch_sizes=(128,) * 4,
        ),
        "trace": examples.trace(job=job),
        "profile": examples.profile(family=job),
        "policy": PolicyVersion(policy=job, version=1, feature_version=1, digest=b""),
        "event": Event(
            job=job,
            generation=0,
            window=0,
            signature="size-stuck",
            service="test",
            value=1.0,
            limit=0.9,
            explanation="made up",
        ),
    }
    return made_up[kind]


def subject_of(kind: str, job: str) -> str:
    return subjects.of("dead", "report", job) if kind == "dead" else subjects.subject_of(message(kind, job))


async def publish(bus: Bus, kind: str, job: str) -> int:
    if kind == "dead":
        dead = Dead(service="test", subject="s", sequence=1, reason="made up", payload=b"")
        return await bus.publish_bytes(subject_of(kind, job), msgspec.msgpack.encode(dead), f"dead:{job}")
    return await bus.publish(message(kind, job))


def wildcard(kind: str) -> str:
    """All subjects of a kind."""
    return subjects.template(BY_NAME[kind], subjects.ANY)


@pytest.mark.parametrize("kind", MAY_PUBLISH)
async def test_a_kind_of_message_comes_from_its_sender_only(connect: Any, kind: str) -> None:
    for user in USERS:
        bus = await connect(user)
        if user in MAY_PUBLISH[kind]:
            assert await publish(bus, kind, f"from-{user}") > 0
        else:
            with pytest.raises(PermissionDeniedError, match=subject_of(kind, f"from-{user}")):
                await publish(bus, kind, f"from-{user}")


@pytest.mark.parametrize("kind", MAY_READ)
async def test_a_kind_of_message_is_read_by_those_who_need_it_only(connect: Any, kind: str) -> None:
    sender = await connect(min(MAY_PUBLISH[kind]))
    sequence = await publish(sender, kind, "read-me")
    stream = BY_NAME[kind].carrier
    for user in USERS:
        bus = await connect(user)
        if user in MAY_READ[kind]:
            assert await read_up_to(bus, stream, wildcard(kind), sequence) == sequence
        elif user != "provision":  # it makes consumers, but is told nothing: see below
            with pytest.raises(PermissionDeniedError):
                await read_up_to(bus, stream, wildcard(kind), sequence)


async def read_up_to(bus: Bus, stream: str, subject: str, sequence: int) -> int:
    async with bus.consume(stream, [subject], start="all") as consumer:
        async for batch in consumer:
            if batch[-1].sequence >= sequence:
                return batch[-1].sequence
    raise AssertionError("the consumer ended")


@pytest.mark.parametrize("user", [user for user in USERS if user != "provision"])
async def test_only_provision_changes_a_stream(connect: Any, user: str) -> None:
    bus = await connect(user)
    with pytest.raises(PermissionDeniedError):
        await write_stream(bus.requests, "CREATE", {"name": "MINE", "subjects": ["mine"]})
    with pytest.raises(PermissionDeniedError):
        await write_stream(bus.requests, "UPDATE", {"name": "FEED", "subjects": ["mine"]})
    for operation in ("STREAM.DELETE.FEED", "STREAM.PURGE.FEED", "STREAM.MSG.DELETE.ACTIONS"):
        with pytest.raises(PermissionDeniedError):
            await bus.requests.ask(operation, {}, Answer)


async def test_provision_cannot_delete_an_action(connect: Any) -> None:
    arbitrator, provisioner = await connect("arbitrator"), await connect("provision")
    sequence = await publish(arbitrator, "action", "kept")
    for operation, body in (("STREAM.MSG.DELETE", {"seq": sequence}), ("STREAM.PURGE", {})):
        with pytest.raises(BusError, match="not permitted"):
            await provisioner.requests._ask_once(f"{operation}.{ACTIONS.name}", json.dumps(body).encode(), Answer)
    stored = await arbitrator.last(ACTIONS.name, subjects.of("action", "kept"))
    assert stored is not None
    assert stored.sequence == sequence


@pytest.mark.parametrize("user", USERS)
async def test_no_user_subscribes_to_anothers_inbox_or_to_live_messages(connect: Any, user: str) -> None:
    bus = await connect(user)
    others = [f"_INBOX.{other}.>" for other in USERS if other != user]
    for subject in (*others, "_INBOX.>", ">", f"{subjects.ROOT}.>", "$JS.>", wildcard("action"), subjects.ANNOUNCED):
        with pytest.raises(PermissionDeniedError):
            async with bus.subscribe(subject) as messages:
                await anext(messages)


async def test_a_consumer_cannot_be_made_to_publish_for_its_maker(connect: Any) -> None:
    """JetStream lets the maker of a consumer name the subject it delivers to; none but a listening client gets it."""
    collector, trainer, provisioner = await connect("collector"), await connect("trainer"), await connect("provision")
    kept = [await provisioner.stream_state(stream.name) for stream in STREAMS if stream is not FEED]
    own = f"{collector._connection.inbox}.deliveries"
    policy = description_subject(POLICIES.bucket, "forged/1")
    targets = (
        subjects.of("action", "forged"),
        policy,
        "$JS.API.STREAM.DELETE.DEAD",
        "$JS.API.STREAM.PURGE.ACTIONS",
        f"$JS.API.DIRECT.GET.JOBS.{subjects.of('job', 'forged')}",
        own,
    )
    delivered = asyncio.Event()
    await collector._connection.subscribe(own, lambda *_: delivered.set())
    for index, target in enumerate(targets):
        await push_consumer(collector, f"pushed-{index}", target, subjects.of("report", "pushed", "node-a"))
    await publish(trainer, "report", "pushed")
    async with asyncio.timeout(30):
        await delivered.wait()  # so the others were delivered, too, if they are at all
    await provisioner._connection.round_trip(5.0)
    assert [await provisioner.stream_state(stream.name) for stream in STREAMS if stream is not FEED] == kept


async def push_consumer(bus: Bus, name: str, target: str, wanted: str) -> None:
    config = {
        "name": name,
        "deliver_subject": target,
        "headers_only": True,
        "ack_policy": "none",
        "deliver_policy": "all",
        "filter_subject": wanted,
    }
    body = {"stream_name": FEED.name, "action": "create", "config": config}
    await bus.requests.ask(f"CONSUMER.CREATE.{FEED.name}.{name}.{wanted}", body, Answer)


@pytest.mark.parametrize(("kind", "sender"), [("reward", "reward"), ("trace", "collector")])
@pytest.mark.parametrize("user", [user for user in USERS if user != "provision"])
async def test_rewards_and_traces_are_heard_by_the_trainer_only(
    connect: Any, user: str, kind: str, sender: str
) -> None:
    source, bus = await connect(sender), await connect(user)
    async with bus.subscribe(subjects.of(kind, "heard", "*")) as heard:
        await bus._connection.round_trip(5.0)
        await publish(source, kind, "heard")
        if user == "trainer":
            assert (await anext(heard)).subject == subjects.of(kind, "heard", "node-a")
        else:
            with pytest.raises(PermissionDeniedError):
                await anext(heard)


@pytest.mark.parametrize("user", USERS)
async def test_a_stored_action_is_heard_and_looked_up_by_the_trainer_only(connect: Any, user: str) -> None:
    arbitrator, bus = await connect("arbitrator"), await connect(user)
    wanted = subjects.of("action", f"heard-by-{user}")
    await publish(arbitrator, "action", f"heard-by-{user}")
    async with bus.follow(ACTIONS.name, wanted) as actions:
        if user == "trainer":
            assert (await anext(actions)).subject == wanted
            again = examples.action(1, job=f"heard-by-{user}", hash=bytes(31))
            await arbitrator.publish(again)
            assert (await anext(actions)).payload == encode(again)
        else:
            with pytest.raises(PermissionDeniedError):
                await anext(actions)


@pytest.mark.parametrize("user", USERS)
async def test_a_policy_is_stored_by_the_learner_and_read_by_those_who_decide_or_look(connect: Any, user: str) -> None:
    learner, bus = await connect("learner"), await connect(user)
    await learner.objects.put(POLICIES.bucket, "kept/1", b"1" * 200_000)
    if user == "learner":
        assert (await bus.objects.put(POLICIES.bucket, "own/1", b"2")).size == 1
        await bus.objects.delete(POLICIES.bucket, "own/1")
    elif user == "provision":  # it has the rights to see what is there, but not to write
        with pytest.raises(PermissionDeniedError):
            await bus.objects.put(POLICIES.bucket, f"by-{user}/1", b"2")
    else:
        with pytest.raises(PermissionDeniedError):
            await bus.objects.put(POLICIES.bucket, f"by-{user}/1", b"2")
        with pytest.raises(PermissionDeniedError):
            await bus.objects.delete(POLICIES.bucket, "kept/1")
    if user in {"arbitrator", "learner", "watcher"}:
        assert (await bus.objects.get(POLICIES.bucket, "kept/1")).data == b"1" * 200_000
        assert "kept/1" in {info.name for info in await bus.objects.list_all(POLICIES.bucket)}
    elif user != "provision":
        with pytest.raises(PermissionDeniedError):
            await bus.objects.get(POLICIES.bucket, "kept/1")


async def test_a_durable_consumer_works_with_the_collectors_rights(connect: Any) -> None:
    trainer, collector = await connect("trainer"), await connect("collector")
    wanted = subjects.of("report", "durable", "node-a")
    async with collector.consume(FEED.name, [wanted], start="new", durable="collector-node-a") as consumer:
        first = await publish(trainer, "report", "durable")
        batch = await anext(consumer)
        assert [message.sequence for message in batch] == [first]
        await consumer.ack(batch[-1])
        await collector._connection.round_trip(5.0)
    async with collector.consume(FEED.name, [wanted], start="new", durable="collector-node-a") as consumer:
        report = msgspec.structs.replace(examples.report(), job="durable", window=1)
        second = await trainer.publish(report)
        assert [message.sequence for message in await anext(consumer)] == [second]
    assert collector.counters["permission_denials"] == 0


async def test_the_arbitrators_compare_and_set_works_with_its_rights(connect: Any) -> None:
    arbitrator = await connect("arbitrator")
    first = await arbitrator.publish_action(examples.action(0, job="cas", hash=bytes(32)), expected_last=0)
    stored = await arbitrator.last(ACTIONS.name, subjects.of("action", "cas"))
    assert stored is not None
    assert stored.sequence == first
    assert await arbitrator.publish_action(examples.action(1, job="cas", hash=bytes(31)), expected_last=first) > first


@pytest.mark.parametrize("user", USERS)
async def test_a_jobs_last_start_is_looked_up_by_those_who_need_it_only(connect: Any, user: str) -> None:
    trainer, bus = await connect("trainer"), await connect(user)
    sequence = await publish(trainer, "job", "looked-up")
    if user == "trainer":
        found = await bus.newest(JOBS.name, subjects.of("job", "looked-up"))
        assert found is not None
        assert found.payload == encode(message("job", "looked-up"))
    elif user in {"arbitrator", "learner", "watcher", "provision"}:
        stored = await bus.last(JOBS.name, subjects.of("job", "looked-up"))
        assert stored is not None
        assert stored.sequence == sequence
    else:
        with pytest.raises(PermissionDeniedError):
            await bus.last(JOBS.name, subjects.of("job", "looked-up"))


@pytest.mark.parametrize(("user", "password"), [("collector", "wrong"), ("unknown", "wrong"), ("", "")])
async def test_a_wrong_password_is_refused(broker: DeployedBroker, user: str, password: str) -> None:
    settings = msgspec.structs.replace(broker.settings("collector"), user=user, password=password, password_file="")
    with pytest.raises(BusError):
        await Bus.connect(settings, name="test-1", wait=False)


@pytest.mark.parametrize(("stream", "kind"), [(FEED, "state"), (ACTIONS, "action")])
async def test_a_thousand_consumers_of_a_stream_keep_no_other_out(connect: Any, stream: Stream, kind: str) -> None:
    """As a thousand nodes have them in FEED; by itself the server refuses the thousand and first."""
    watcher, wanted = await connect(WATCHER), subjects.template(BY_NAME[kind], subjects.ANY)

    async def make(name: str) -> None:
        config = {"name": name, "ack_policy": "none", "mem_storage": True, "filter_subject": wanted}
        body = {"stream_name": stream.name, "config": config, "action": "create"}
        await watcher.requests.ask(f"CONSUMER.CREATE.{stream.name}.{name}.{wanted}", body, Answer)

    async def delete(name: str) -> None:
        await watcher.requests.ask(f"CONSUMER.DELETE.{stream.name}.{name}", None, Answer)

    crowds = [[f"node-{number}" for number in range(start, start + 50)] for start in range(0, 1000, 50)]
    for crowd in crowds:
        await asyncio.gather(*map(make, crowd))
    async with watcher.consume(stream.name, [wanted], start="new"):
        assert (await watcher.stream_state(stream.name)).num_consumers >= 1001  # other tests have left some
    for crowd in crowds:
        await asyncio.gather(*map(delete, crowd))


async def test_provisioning_again_changes_nothing(connect: Any) -> None:
    assert await provision(await connect("provision")) == [f"{stream.name}: unchanged" for stream in STREAMS]


def test_the_server_runs_as_the_file_says(broker: DeployedBroker) -> None:
    shown = monitor(broker, "varz")
    assert shown["max_payload"] == 1 << 20
    store = shown["jetstream"]["config"]
    assert (store["sync_interval"], store.get("sync_always", False)) == (200_000_000, False)
    assert monitor(broker, "healthz") == {"status": "ok"}
    assert monitor(broker, "jsz")["limits"] == {"default_max_consumers": 5000}
    assert not {"mqtt", "websocket", "leaf", "gateway"} & {key for key in shown if (shown[key] or {}) not in ({}, 0)}


def monitor(broker: DeployedBroker, page: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{broker.monitor}/{page}", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
