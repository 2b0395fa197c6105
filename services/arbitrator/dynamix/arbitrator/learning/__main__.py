"""Run the learner: `python -m dynamix.arbitrator.learning`."""

import sys

from dynamix.runtime.service import run

from .service import LearnerSettings, serve

if __name__ == "__main__":
    sys.exit(run("learner", LearnerSettings, serve))
