"""Run the reward service: `python -m dynamix.reward`."""

import sys

from dynamix.runtime.service import run

from .service import serve
from .settings import RewardSettings

if __name__ == "__main__":
    sys.exit(run("reward", RewardSettings, serve))
