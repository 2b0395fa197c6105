"""The messages, each a frozen Struct: `from dynamix.schemas.messages import Report`.

`job` begins and ends a run, `measured` and `decided` hold what travels for one window, in its order, `operations` what
operators read. Every message names its job, generation (restart count) and, where it has one, its window (index from 0
in each generation). A new field goes at the end and has a default; a changed meaning is a new version of the codec.
The kinds of message, with their subjects, senders and receivers, are in `dynamix.schemas.kinds`.

`traces` is what agents leave where no centre decides, `profiles` what a run leaves to the next one of its family.
`allocation`, `fields` and `policies` hold the values that messages are made of: this room imports no other of schemas.
"""

from .allocation import Sizes
from .decided import Action, Applied, RankReward, Reward
from .fields import Message, OptimizerFamily
from .job import Job, NodeRanks
from .measured import (
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
    SocketCounters,
    State,
    SystemMetrics,
    TrainingMetrics,
)
from .operations import Dead, Event, Live, PolicyVersion, Signature
from .profiles import ArmRecord, ExploredArm, JobProfile, NoisePoint
from .traces import FieldView, SeenTrace, Trace

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
