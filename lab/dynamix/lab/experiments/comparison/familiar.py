"""Which scenarios a learned policy knows from its learning: a comparison on these does not show what it is worth."""

from collections.abc import Iterable
from pathlib import Path

from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.lab.experiments.episodes.suite import TRAIN, Suite, digest_of, suite_named


def familiar_scenarios(files: Iterable[str], suite: Suite) -> list[str]:
    """Names of the suite's scenarios that policy files were learned on.

    A file names the train scenarios it learned on. A name alone proves nothing, since suites may share it: the suite's
    scenario must say the same as the train scenario.

    Raises:
        PolicyFileError: when a file is no policy file.
    """
    names = {name for file in files for name in PolicyFile.read(Path(file)).metadata.scenarios}
    train = {scenario.name: digest_of(scenario) for scenario in suite_named(TRAIN).scenarios}
    return [
        scenario.name
        for scenario in suite.scenarios
        if scenario.name in names and train.get(scenario.name) == digest_of(scenario)
    ]
