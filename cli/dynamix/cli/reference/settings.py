"""What each process reads from its environment, as Markdown."""

from typing import NamedTuple

import msgspec

from dynamix.arbitrator.learning.service import LearnerSettings
from dynamix.arbitrator.service import ArbitratorSettings
from dynamix.cli.commands.up.command import UpSettings
from dynamix.cli.dashboard.settings import DashboardSettings
from dynamix.collector.observation import CollectorSettings
from dynamix.reward.service import RewardSettings
from dynamix.runtime.settings import BusSettings, SharedSettings, describe
from dynamix.trainer.settings import TrainerSettings

HEAD = "| variable | default | meaning |\n|---|---|---|\n"


class SettingsOwner(NamedTuple):
    """Whose settings they are."""

    title: str
    component: str
    struct: type[msgspec.Struct]


OWNERS = (
    SettingsOwner("All processes", "", SharedSettings),
    SettingsOwner("The bus, in all processes", "nats", BusSettings),
    SettingsOwner("Collector", "collector", CollectorSettings),
    SettingsOwner("Reward", "reward", RewardSettings),
    SettingsOwner("Arbitrator", "arbitrator", ArbitratorSettings),
    SettingsOwner("Learner (`python -m dynamix.arbitrator.learning`)", "learner", LearnerSettings),
    SettingsOwner("Training processes", "trainer", TrainerSettings),
    SettingsOwner("`dynamix up`", "up", UpSettings),
    SettingsOwner("`dynamix dashboard`", "dashboard", DashboardSettings),
)


def settings_section(owner: SettingsOwner) -> str:
    """The variables of one owner."""
    rows = "".join(
        f"| `{one.variable}` | {f'`{one.default}`' if one.default else ''} | {one.meaning} |\n"
        for one in describe(owner.struct, owner.component)
    )
    return f"### {owner.title}\n\n{HEAD}{rows}"
