"""Policies that other packages register: they decide their own jobs and disturb no others."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support import examples, learned
from tests.support.arbitrators import stored_actions
from tests.support.brokers import until
from tests.support.extensions import register
from tests.support.services_here import arbitrator_here

from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.policies.baselines import Static
from dynamix.arbitrator.policies.policy import Decision, Policy
from dynamix.arbitrator.policies.registry import POLICIES, extension_policy, policy_named, policy_names
from dynamix.lab.comparison.rows import parse_rows
from dynamix.runtime.bus import Bus
from dynamix.runtime.extensions import ExtensionError
from dynamix.schemas.messages import Action, Job

Write = Callable[[str], int]
NODES: dict[str, tuple[int, ...]] = {"node-a": (0, 1), "node-b": (2, 3)}
ODD, OTHER = examples.job(NODES, job="odd-0", policy="odd"), examples.job(NODES, job="other-0", policy="static")
HALVED = examples.job(NODES, policy="halving")
THEIRS = """
from dynamix.arbitrator.policies.baselines import Static as Theirs
Theirs = type("Theirs", (Theirs,), {"name": "theirs"})
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the module of a policy that a package registers."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_module", raising=False)
    register(tmp_path, "their-package", "dynamix.policies", theirs="their_module:Theirs", rule="their_module:Theirs")
    return (tmp_path / "their_module.py").write_text


@pytest.mark.usefixtures("example_extension")
async def test_an_arbitrator_decides_with_an_installed_policy(bus: Bus) -> None:
    await bus.publish(HALVED)
    async with arbitrator_here(bus):
        await report(bus, HALVED)
        (action,) = await stored_actions(bus, HALVED.job, 1)
    assert (action.policy, action.policy_version, action.policy_digest) == ("halving", 3, b"")
    assert action.local_batch_sizes == (64, 64, 64, 64)
    assert parse_rows("halving:divisor=4")[0].options == {"divisor": 4}  # a comparison can have it


@pytest.mark.usefixtures("example_extension")
async def test_a_job_is_held_to_the_options_and_the_version_of_an_installed_policy(bus: Bus) -> None:
    source = PolicyStore(bus)
    with pytest.raises(ValueError, match=r"policy 'halving' has no option 'track': known are divisor, version"):
        await source.choose(examples.job(policy="halving", policy_options={"track": 1.0}), None)
    with pytest.raises(ValueError, match=r"policy 'halving' has version 3, not 2"):
        await source.choose(HALVED, examples.action(policy="halving", policy_version=2, policy_digest=b""))
    with pytest.raises(ValueError, match=r"'halving' is the name of a policy in code"):
        await PolicyStore(bus).put("halving", b"")


def test_our_own_names_are_never_another_packages(theirs: Write) -> None:
    theirs("raise RuntimeError")
    assert policy_named("rule") is POLICIES["rule"]
    assert {"rule", "theirs"} <= set(policy_names())
    with pytest.raises(ValueError, match=r"no policy is called 'their': choose one of accordion, .*, theirs$"):
        policy_named("their")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Theirs = object()", "it lacks name, version, options, decide"),
        (THEIRS + "Theirs.name = 'mine'", "its name is 'mine', not the registered one"),
        (THEIRS + "Theirs.version = 0", "its version is 0, not a whole number from 1"),
        (THEIRS + "Theirs.options = {'track': 1.0}", "its options are not a mapping from names to"),
    ],
)
def test_what_is_no_policy_is_refused_with_the_reason(theirs: Write, source: str, reason: str) -> None:
    theirs(source)
    with pytest.raises(ExtensionError, match=f"their-package 1.0 registers 'theirs'.*{reason}.*; fix the package"):
        extension_policy("theirs")


def test_an_error_in_an_extension_names_the_policy_and_the_window(theirs: Write) -> None:
    theirs(f"{THEIRS}\ndef decide(*arguments):\n    raise SystemExit('full')\nTheirs.decide = decide")
    policy = extension_policy("theirs")
    assert policy is not None
    with pytest.raises(ExtensionError, match=r"'theirs' \(their_module\.Theirs\) failed at window 4: .*: full; fix"):
        policy.decide(HALVED, 4, None, None, b"")  # type: ignore[arg-type]  # it looks at none


# --- an error of one job's policy halts the decisions for that generation only ---


async def report(bus: Bus, job: Job) -> None:
    """One window of all nodes."""
    for node, ranks in NODES.items():
        await bus.publish(msgspec.structs.replace(examples.state(node, ranks), job=job.job))


class Broken(Static):
    """Raises in every window."""

    def decide(self, *arguments: object) -> Decision:
        raise TypeError(arguments)


@pytest.mark.parametrize("fault", ["a file of odd metadata", "no policy", "a policy that raises"])
@pytest.mark.parametrize("is_there_first", [True, False])
async def test_a_policy_that_cannot_decide_halts_its_own_generation_only(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, fault: str, is_there_first: bool
) -> None:
    choose = PolicyStore.choose

    async def broken(self: PolicyStore, job: Job, recorded: Action | None) -> Policy:
        if job.job == ODD.job and fault == "no policy":
            raise OverflowError("1e400")
        is_raising = job.job == ODD.job and fault == "a policy that raises"
        return Broken() if is_raising else await choose(self, job, recorded)

    monkeypatch.setattr(PolicyStore, "choose", broken)
    await PolicyStore(bus).put("odd", learned.with_metadata("\ud800"))
    await bus.publish(ODD)
    await bus.publish(OTHER)
    if is_there_first:
        await report(bus, ODD)
    async with arbitrator_here(bus) as context:
        if not is_there_first:
            await report(bus, ODD)
        await report(bus, OTHER)
        assert [action.job for action in await stored_actions(bus, "*", 1)] == [OTHER.job]
        await until(lambda: context.counters.get("halted") == 1)  # jobs are opened beside each other
