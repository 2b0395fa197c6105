"""Check of one job's stored actions: each as it was written, each after its predecessor, none missing at the end."""

from dynamix.arbitrator.deciding.action_store import ActionStoreError, check_receipt, newest_action, newest_receipt
from dynamix.cli.broker import connected
from dynamix.cli.errors import CommandError
from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, JOBS

from .check import DoctorCheck, failed, passed

NAME = "actions"
FIX = "restore the broker's store from a backup, or start the run under a new id: the arbitrator decides nothing on it"


async def actions(settings: BusSettings, job: str) -> DoctorCheck:
    """Check that all stored actions of a job are intact."""
    try:
        async with connected(settings, "doctor", wait=False) as bus:
            return await _check_job(bus, job)
    except CommandError as error:
        return failed(NAME, "training", str(error), "check DYNAMIX_NATS_URL, _USER and _PASSWORD_FILE")


async def _check_job(bus: Bus, job: str) -> DoctorCheck:
    try:
        return await _check(bus, job)
    except (ActionStoreError, BrokenChainError, MalformedMessageError) as error:
        return failed(NAME, "training", str(error), FIX)
    except (BusError, ValueError) as error:
        return failed(NAME, "training", str(error), "ask as the user `watcher`, for a job that `dynamix top` shows")


async def _check(bus: Bus, name: str) -> DoctorCheck:
    message = await bus.last(JOBS.name, subjects.job(name))
    if message is None:
        return failed(NAME, "training", f"no job is called {name!r}", "`dynamix top` shows the jobs")
    job = decode(Job, message.subject, message.payload)
    receipt = await newest_receipt(bus, job)
    newest = await newest_action(bus, job)
    await check_receipt(bus, job, newest, receipt)
    if newest is None:
        return passed(NAME, "training", f"none yet of {name}")
    num_actions = await _check_chain(bus, name, newest.sequence)
    window, generation = newest.action.window, newest.action.generation
    found = f"{num_actions:,} of {name}, a whole chain up to window {window} of generation {generation}"
    return passed(NAME, "training", found)


async def _check_chain(bus: Bus, name: str, last: int) -> int:
    """Check the chain up to a sequence; the number of actions."""
    check = ChainCheck()
    async with bus.consume(ACTIONS.name, [subjects.action(name)], start="all") as consumer:
        async for batch in consumer:
            for message in batch:
                if message.sequence <= last:
                    check.check_next(decode(Action, message.subject, message.payload), message.payload)
            if batch[-1].sequence >= last:
                break
    return check.num_actions
