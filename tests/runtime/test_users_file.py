"""The broker's file of users: generated, read back as it was written, and the shipped one is today's."""

from pathlib import Path

import pytest

from dynamix.runtime.bus.users.permissions import PROVISION, ROLES, common, permissions_of, requests
from dynamix.runtime.bus.users.users_file import (
    DEFAULT,
    SPARE_ACCOUNTS,
    User,
    UsersFileError,
    accounts_file,
    numbered,
    read_users,
    users_files,
    with_first_key,
    write_users,
)

SHIPPED = Path(__file__).parents[2] / "deploy" / "users" / "users.conf"
KEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def test_the_shipped_file_is_generated_from_the_table_of_kinds() -> None:
    how = "python -m dynamix.runtime.bus.users deploy/users/users.conf"
    for path, text in users_files(SHIPPED, DEFAULT).items():
        assert path.read_text() == text, how


def test_users_are_read_back_as_they_were_written() -> None:
    users = [
        *DEFAULT,
        User(name="alice", role="trainer", jobs=("alice-1", "alice-2"), keys=(KEY, KEY[::-1]), account=2),
        User(name="node-a", role="collector", nodes=("node-a",), keys=(KEY,)),
        User(name="reward-1", role="reward", instances=("1",), keys=(KEY[1:] + "A",)),
    ]
    text = write_users(users, "DYNAMIX")
    assert read_users(text) == users
    assert text.count(f"nkey: {KEY}\n") == 1, "alice logs in to an account of her own, the others' are of before"
    assert text.count("password: $NATS_PASSWORD_") == len(ROLES)


def trainer_of(name: str, account: int = 0) -> User:
    return User(name=name, role="trainer", jobs=(f"{name}-1",), keys=(KEY,), account=account)


def test_each_trainer_of_certain_jobs_keeps_its_account_and_new_ones_take_what_is_free() -> None:
    found = numbered(
        [DEFAULT[0], trainer_of("alice"), trainer_of("bob", 3), trainer_of("carol", 1), trainer_of("dave")]
    )
    assert [user.account for user in found] == [0, 2, 3, 1, 4]
    assert numbered(found) == found
    assert [user.account for user in numbered([*found[:1], *found[2:], trainer_of("eve")])] == [0, 3, 1, 4, 2]


def test_an_account_has_one_user_and_what_is_of_its_jobs_and_some_are_empty() -> None:
    path = Path("users/shard-b.conf")
    texts = users_files(path, [*DEFAULT, trainer_of("alice")])
    accounts = texts[accounts_file(path)]
    assert accounts_file(path) == Path("users/shard-b-accounts.conf")
    own, _, rest = accounts.partition("SHARD_B_jobs_1 {")[2].partition("\n}\n")
    assert own.count("nkey: ") == 1
    assert '{ service: { account: SHARD_B, subject: "dynamix.v1.report.alice-1.*" } }' in own
    assert '{ stream: { account: SHARD_B, subject: "dynamix.v1.stored.action.alice-1" } }' in own
    assert rest.split("\n")[0] == "SHARD_B_jobs_2 { users: [] }"
    assert rest.count("{ users: [] }") == SPARE_ACCOUNTS
    assert read_users(texts[path])[-1] == trainer_of("alice", 1)
    exported = texts[path].partition("exports: [")[2]
    assert '{ service: "dynamix.v1.report.*.*" }' in exported
    assert exported.count("_INBOX") == exported.count("_INBOX.watcher.>") == 2, "for answers to discovery"


@pytest.mark.parametrize("role", [role for role in ROLES if role not in ("trainer", PROVISION)])
def test_a_service_with_a_key_asks_jetstream_by_another_prefix(role: str) -> None:
    """The server answers what begins with $JS.API in each account by itself."""
    user = with_first_key(User(name="mine", role=role), KEY)
    texts = users_files(Path("users/users.conf"), [*DEFAULT, user])
    own = texts[Path("users/users-accounts.conf")].partition(f"DYNAMIX_{role} {{")[2].partition("\n}\n")[0]
    permitted, _, crossing = own.partition("exports: [")
    imported = crossing.partition("imports: [")[2]
    assert user.api == "dynamix.api."
    assert "$JS.API." not in permitted
    assert '"dynamix.api.CONSUMER.MSG.NEXT.' in permitted
    asked = [line for line in imported.splitlines() if "$JS.API." in line]
    assert len(asked) == permitted.partition("subscribe:")[0].count('"dynamix.api.')
    assert all('to: "dynamix.api.' in line for line in asked)


@pytest.mark.parametrize("role", [role for role in ROLES if role != PROVISION])
def test_no_two_imports_of_a_role_take_the_same_subject(role: str) -> None:
    """A request would be carried out twice; an acknowledgement may be."""
    found = requests(role, permissions_of(role, role))
    taken = [one for one in found if not one.local.startswith("$JS.ACK.")]
    pairs = [(a.local, b.local) for a in taken for b in taken if a is not b and overlap(a.local, b.local)]
    assert pairs == []


def overlap(one: str, other: str) -> bool:
    """Whether some subject is matched by both."""
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return one.count(".") == other.count(".")


@pytest.mark.parametrize(
    ("heard", "said", "both"),
    [
        ("dynamix.v1.live.*.*", "dynamix.v1.live.reward.*", "dynamix.v1.live.reward.*"),
        ("dynamix.v1.trace.job-1.*", "dynamix.v1.trace.*.*", "dynamix.v1.trace.job-1.*"),
        ("$SRV.PING", "$SRV.>", "$SRV.PING"),
        ("$SRV", "$SRV.>", None),
        ("dynamix.v1.trace.*.*", "dynamix.v1.reward.*.*", None),
        ("dynamix.v1.trace.*", "dynamix.v1.trace.*.*", None),
        ("dynamix.v1.trace.*.b", "dynamix.v1.trace.a.*", None),
    ],
)
def test_what_two_filters_have_in_common_is_the_narrower_one(heard: str, said: str, both: str | None) -> None:
    assert common(heard, said) == both


def test_an_operators_key_and_that_of_an_earlier_service_stay_with_the_streams() -> None:
    operator = with_first_key(User(name="admin", role=PROVISION), KEY)
    earlier = User(name="node-a", role="collector", nodes=("node-a",), keys=(KEY,))
    assert [user.account for user in numbered([operator, earlier])] == [0, 0]
    assert (operator.api, earlier.api) == ("", "")


def test_a_trainer_of_one_job_may_do_this_and_nothing_else() -> None:
    assert permissions_of("trainer", "alice", jobs=("j",)) == (
        (
            "dynamix.v1.job.j",
            "dynamix.v1.report.j.*",
            "dynamix.v1.applied.j",
            "dynamix.v1.dead.*.j",
            "dynamix.v1.live.trainer.*",
            "$JS.API.DIRECT.GET.JOBS.dynamix.v1.job.j",
            "$JS.API.DIRECT.GET.ACTIONS.dynamix.v1.action.j",
        ),
        (
            "_INBOX.alice.>",
            "dynamix.v1.live.trainer.*",
            "dynamix.v1.reward.j.*",
            "dynamix.v1.stored.action.j",
            "dynamix.v1.trace.j.*",
        ),
    )


def test_a_collector_of_one_node_may_do_this_and_nothing_else() -> None:
    publish, subscribe = permissions_of("collector", "node-a", nodes=("node-a",))
    assert publish == (
        "dynamix.v1.window.*.node-a",
        "dynamix.v1.state.*.node-a",
        "dynamix.v1.trace.*.node-a",
        "dynamix.v1.dead.*.*",
        "dynamix.v1.live.collector.node-a",
        "$JS.API.STREAM.INFO.FEED",
        "$JS.API.CONSUMER.CREATE.FEED.collector-node-a.dynamix.v1.report.*.node-a",
        "$JS.API.CONSUMER.MSG.NEXT.FEED.collector-node-a",
        "$JS.API.CONSUMER.INFO.FEED.collector-node-a",
        "$JS.API.CONSUMER.RESET.FEED.collector-node-a",
        "$JS.ACK.FEED.collector-node-a.>",
        "$JS.ACK._.*.FEED.collector-node-a.>",
        "_INBOX.watcher.>",
    )
    assert subscribe[:2] == ("_INBOX.node-a.>", "dynamix.v1.live.collector.node-a")
    assert all(subject.startswith("$SRV.") for subject in subscribe[2:])


def test_a_reward_service_of_one_instance_reaches_no_consumer_but_its_own() -> None:
    publish, subscribe = permissions_of("reward", "reward-a", instances=("1",))
    assert publish == (
        "dynamix.v1.reward.*.*",
        "dynamix.v1.dead.*.*",
        "dynamix.v1.live.reward.1",
        "$JS.API.STREAM.INFO.FEED",
        "$JS.API.CONSUMER.CREATE.FEED.reward-1.dynamix.v1.window.*.*",
        "$JS.API.CONSUMER.MSG.NEXT.FEED.reward-1",
        "$JS.API.CONSUMER.INFO.FEED.reward-1",
        "$JS.API.CONSUMER.RESET.FEED.reward-1",
        "$JS.ACK.FEED.reward-1.>",
        "$JS.ACK._.*.FEED.reward-1.>",
        "_INBOX.watcher.>",
    )
    assert subscribe[:2] == ("_INBOX.reward-a.>", "dynamix.v1.live.reward.1")


def test_several_jobs_are_all_permitted_and_no_other() -> None:
    publish, _ = permissions_of("trainer", "alice", jobs=("a", "b"))
    assert [subject for subject in publish if subject.startswith("dynamix.v1.job.")] == [
        "dynamix.v1.job.a",
        "dynamix.v1.job.b",
    ]


def test_only_a_watcher_listens_below_the_watchers_inbox() -> None:
    inboxes = {role: permissions_of(role, "alice").subscribe[0] for role in ROLES}
    assert inboxes.pop("watcher") == "_INBOX.watcher.alice.>"
    assert set(inboxes.values()) == {"_INBOX.alice.>"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "Alice"}, "cannot be part of a subject"),
        ({"name": "a.b"}, "cannot be part of a subject"),
        ({"jobs": ("a.*",)}, "cannot be part of a subject"),
        ({"jobs": ("*",)}, "cannot be part of a subject"),
        ({"role": "trainr"}, "did you mean trainer"),
        ({"name": "watcher"}, "it would share its inbox"),
        ({"nodes": ("a",)}, "a trainer has no node of its own"),
        ({"role": "reward", "jobs": ("a",)}, "a reward has no jobs of its own"),
        ({"role": "arbitrator", "instances": ("a",)}, "a arbitrator has no instance of its own"),
    ],
)
def test_a_user_that_cannot_be_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        User(**{"name": "alice", "role": "trainer", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no users"),
        ("users: []\n", "it has no users"),
        ('#: {"name": "a"}\n', "line 1 is no user: .*role"),
        ('\n#: {"name": "a", "role": "trainer", "job": "x"}\n', "line 2 is no user: .*job"),
        ("#: nonsense\n", "line 1 is no user"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_line(text: str, reason: str) -> None:
    with pytest.raises(UsersFileError, match=reason):
        read_users(text)


def test_a_file_of_which_a_change_would_lose_a_part_is_refused() -> None:
    text = write_users([*DEFAULT, trainer_of("alice", 1)], "DYNAMIX")
    with pytest.raises(UsersFileError, match="its end is missing: restore it from a copy"):
        read_users(text[: text.index("exports:") + 20])
    with pytest.raises(UsersFileError, match="its end is missing"):
        read_users(text[: text.index("users: [")])
    added = text.replace("users: [", "users: [\n  { user: guest, password: $GUEST }", 1)
    with pytest.raises(UsersFileError, match=r"line 16 lets in guest, whom `dynamix keys` does not know: put it into"):
        read_users(added)
