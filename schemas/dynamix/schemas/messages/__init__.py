"""The messages, each a frozen Struct: `from dynamix.schemas.messages import Report`.

`job` begins and ends a run, `windows` and `decisions` hold what is sent for one window, `operations` what operators
read; `allocation` and `fields` have the values that messages are made of. Every message names its job,
generation (restart count) and, where it has one, its window (index from 0 in each generation). A new field goes at the
end and has a default; a changed meaning is a new version of the codec. `dynamix.schemas.kinds` has the kinds of message
with their subjects, senders and receivers.
"""

from .allocation import Sizes
from .decisions import Action, Applied, ArmRecord, ExploredArm, JobProfile, NoisePoint, RankReward, Reward
from .fields import Message, OptimizerFamily
from .job import Job, NodeRanks
from .operations import Dead, Event, Live, PolicyVersion, Signature
from .windows import (
    FieldView,
    GlobalMetrics,
    GradientNoise,
    JobTotals,
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    ParameterDrift,
    Probe,
    RankMetrics,
    RankRow,
    Report,
    SeenTrace,
    SocketCounters,
    State,
    SystemMetrics,
    Trace,
    TrainingMetrics,
)

__all__ = [
    "Action",
    "Applied",
    "ArmRecord",
    "Dead",
    "Event",
    "ExploredArm",
    "FieldView",
    "GlobalMetrics",
    "GradientNoise",
    "Job",
    "JobProfile",
    "JobTotals",
    "Live",
    "Message",
    "MetricWindow",
    "NetworkMetrics",
    "NodeMetrics",
    "NodeRanks",
    "NoisePoint",
    "OptimizerFamily",
    "ParameterDrift",
    "PolicyVersion",
    "Probe",
    "RankMetrics",
    "RankReward",
    "RankRow",
    "Report",
    "Reward",
    "SeenTrace",
    "Signature",
    "Sizes",
    "SocketCounters",
    "State",
    "SystemMetrics",
    "Trace",
    "TrainingMetrics",
]
