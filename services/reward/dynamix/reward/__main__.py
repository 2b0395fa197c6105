"""Run the reward service: `python -m dynamix.reward`."""

import sys

from dynamix.runtime.service import run

from .service import RewardSettings, serve

if __name__ == "__main__":
    sys.exit(run("reward", RewardSettings, serve))
