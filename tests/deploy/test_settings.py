"""Every DYNAMIX_ key that a file of deploy/ sets is one that some component reads."""

import re
from pathlib import Path

from dynamix.arbitrator.learning.service import LearnerSettings
from dynamix.arbitrator.service import ArbitratorSettings
from dynamix.collector.observation import CollectorSettings
from dynamix.reward.service import RewardSettings
from dynamix.runtime.settings import BusSettings, SharedSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
STRUCTS = {
    "": SharedSettings,
    "nats": BusSettings,
    "collector": CollectorSettings,
    "reward": RewardSettings,
    "arbitrator": ArbitratorSettings,
    "learner": LearnerSettings,
}


def test_every_key_in_deploy_is_a_setting() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and "secrets" not in path.parts]
    used = {key for path in files for key in re.findall(r"\bDYNAMIX_[A-Z_]+\b", path.read_text())}
    assert {"DYNAMIX_NATS_URL", "DYNAMIX_NATS_CREDS_FILE"} <= used
    known = {
        "_".join(filter(None, ("DYNAMIX", component.upper(), field.upper())))
        for component, struct in STRUCTS.items()
        for field in struct.__struct_fields__
    }
    assert used - known == set()
