"""The tables of docs/results.md from virtual clusters: `python -m bench.virtual [--only NAME ...] [--scale full]`.

Gradients, data and accuracy are real, the clock is a model (scenarios/README.md). `EXPERIMENTS` lists all: an
experiment compares policies, as `dynamix evaluate` spells them, on clusters that are a few changes of one mixed
cluster. Each writes its table to docs/results/NAME.csv (--csv) and its curves to NAME.png beside it. Runs and learned
policies are kept in --work: a second start goes on where the first one was killed.

`reduced` takes a few minutes each on a core, `full` is for many cores and a long night; `smoke` shows that it runs.
Some run only when --only names them: `heldout` and `...-heldout` are `dynamix evaluate` on held-out scenarios,
`adaptdl` needs AdaptDL's packages (`make adaptdl`), `paper-...` are the paper's models at their own size (hours;
CIFAR-10 and a text).
"""

import argparse
import importlib.metadata
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from bench.harness import ROOT, BenchmarkError, Cell, Interval, Panel, Table, draw
from bench.paper import run_to
from scipy.stats import spearmanr

from dynamix.arbitrator.learned.policy_file import PPOSettings
from dynamix.cli.main import main as dynamix
from dynamix.cli.terminal import ProgressLine
from dynamix.lab.comparison.figure import CURVE_POINTS, mean_curve
from dynamix.lab.comparison.rows import Tuned, parse_rows, read_tuned
from dynamix.lab.comparison.runs import Ledger, as_published, fill, plan
from dynamix.lab.comparison.verdict import OutcomeTable, Verdict
from dynamix.lab.learning import LearningUpdate, learn, plan_named
from dynamix.lab.learning.trial import EXCHANGES, constant_times
from dynamix.lab.simulator.episode import RunOutcome, code_digest
from dynamix.lab.simulator.scenario import (
    TUNED_FILE,
    Network,
    Scenario,
    Stragglers,
    Suite,
    Workers,
    scenario_root,
    suite_named,
)
from dynamix.lab.workloads import workload_named
from dynamix.lab.workloads.datasets import MissingDataError
from dynamix.reward.formula import Weights
from dynamix.runtime.extensions import extension_names

Changes = Mapping[str, Any]
"""Fields of a scenario, or of a learning plan, with other values."""


# --- the experiments -------------------------------------------------------------------------------------------------

SPEEDS = (4000.0, 2000.0, 1000.0, 500.0)
"""Samples per second of the four kinds of workers."""
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
"""Rates for a global batch of 512, as in the scenarios."""
BASE = "static@64"
"""Row with which every time to a target is compared."""
STATICS = ("static@32", "static@64", "static@128")
"""The published baselines."""
ROWS = (BASE, "random", "goodput", "rule")
LEARNED_ROWS = (BASE, "static@32", "static@128", "random", "rule")
PAPER, OURS = "ppo-paper", "ppo"
PAPER_ROWS = (BASE, "rule", "rule/exchange=local", "static@32", PAPER, "static@128")
"""In the order to run them."""
IMAGE: Changes = {"workload": "fashion-14-cnn", "target_accuracy": 0.82, "time_limit_s": 90.0}
"""Stands in for VGG11 on CIFAR-10, whose step takes seconds on a core; `paper-vgg11` is that."""
ADAM: Changes = {"optimizer": "adam"}
TEXT: Changes = {
    "workload": "text-transformer",
    "optimizer": "adamw",
    "learning_rate": 0.003,
    "base_global_batch_size": 256,
    "initial_local_batch_size": 32,
    "target_accuracy": 0.28,  # what a letter before the next one tells; 0.2 is there at the second look
    "fixed_time_s": 2.0,
    "time_limit_s": 20.0,
    "evaluation_samples": 500,
    "noise_every": 10,
}
SMOKE: Changes = {
    "workload": "fashion-14-mlp",
    "num_train_samples": 2000,
    "evaluation_samples": 500,
    "target_accuracy": 0.8,
    "fixed_time_s": 1.0,
    "time_limit_s": 6.0,
    "evaluate_every_s": 0.25,
}


class Learning(NamedTuple):
    """A policy that is learned before it is compared, once per learning seed."""

    policy: str
    name: str
    """Name of the cluster that it is learned on."""
    cluster: Changes = MappingProxyType({})
    plan: Changes = MappingProxyType({})
    """Changes of the learning plan, such as `weights`."""


class Group(NamedTuple):
    """Rows of a table: policies on one cluster."""

    titles: tuple[Cell, ...]
    """First cells of each row."""
    name: str
    """Name of the cluster."""
    rows: Sequence[str]
    cluster: Changes = MappingProxyType({})
    learned: tuple[Learning, ...] = ()
    shown: tuple[str, ...] = ()
    """Rows of the table, if not all."""


class Experiment(NamedTuple):
    """Groups of rows, all against `BASE` in the same cluster."""

    about: str
    titles: tuple[str, ...]
    """Headings of the groups' titles."""
    groups: Sequence[Group]
    num_samples: int = 0
    """Each run ends when it has trained so many, in whatever time; 0: by time."""
    levels: tuple[float, ...] = ()
    """Accuracies whose times are shown where runs end by samples."""
    panels: tuple[str, ...] = ()
    """Clusters whose accuracy is drawn over time."""


_ON_IMAGES = Learning(PAPER, "image-sgd", IMAGE)
_BOTH = (Learning(PAPER, "home"), Learning(OURS, "home"))
_HOME_ROWS = (PAPER, OURS, *LEARNED_ROWS)
_WEIGHTS = Weights(beta=0.3, delta=0.003)


def _weights(**changes: float) -> Changes:
    """The published reward; the defaults are those whose best constant is nearest to the fastest one."""
    return {"formula": None, "weights": msgspec.structs.replace(_WEIGHTS, **changes)}


def _sensitivity() -> list[Group]:
    """Each weight at 0, 1 and 10 times its default, the others unchanged, and k at 5, 10, 20; eta with Adam."""
    groups = []
    for parameter in ("alpha", "beta", "delta", "eta"):
        name, cluster = ("home-adam", ADAM) if parameter == "eta" else ("home", {})
        for factor in (0.0, 1.0, 10.0):
            value = factor * getattr(_WEIGHTS, parameter)
            learned = Learning(PAPER, name, cluster, _weights(**{parameter: value}))
            groups.append(Group((parameter, value), name, (PAPER, BASE), cluster, (learned,), (PAPER,)))
    for steps in (5, 10, 20):
        name, cluster = ("home", {}) if steps == 10 else (f"home-k{steps}", {"window_steps": steps})
        learned = Learning(PAPER, name, cluster, _weights())
        groups.append(Group(("k", float(steps)), name, (PAPER, BASE), cluster, (learned,), (PAPER,)))
    return groups


def _rewards() -> list[Group]:
    """The published reward, with single terms taken out, and progress per second."""
    variants: dict[str, Changes] = {
        "as published": _weights(),
        "no size penalty": _weights(delta=0.0),
        "no time penalty": _weights(beta=0.0),
        "no level of accuracy": _weights(accuracy=0.0),
        "progress per second": {},
        "progress per second, simplified objective": {"settings": PPOSettings(objective="simplified")},
    }
    return [
        Group((title,), "home", (PAPER, BASE), {}, (Learning(PAPER, "home", {}, plan),), (PAPER,))
        for title, plan in variants.items()
    ]


def _slow_network(**changes: Any) -> Changes:
    network = Network(bandwidth_mbit_s=1000.0, gradient_bytes=8_000_000, **changes)
    return {"network": network, "fixed_time_s": 60.0, "time_limit_s": 600.0, "evaluate_every_s": 1.0}


def _paper(name: str, num_samples: int, levels: tuple[float, ...] = (0.6, 0.7, 0.75), **job: Any) -> Experiment:
    """The published agent is the shipped one: learned on Fashion-MNIST, not on these models, which would take days."""
    cluster = {"network": Network(), "noise_every": 10, "evaluation_samples": 1000, "evaluate_every_s": 1.0, **job}
    limits = {"fixed_time_s": num_samples / 10_000, "time_limit_s": num_samples / 2000, "target_accuracy": levels[-1]}
    group = Group((), name, PAPER_ROWS, {**cluster, **limits})
    return Experiment(f"{job['workload']}, in full", (), (group,), num_samples, levels, (name,))


_TEXT = _paper(
    *("paper-transformer", 500_000, (0.40, 0.45, 0.50)),
    **{key: TEXT[key] for key in ("workload", "optimizer", "base_global_batch_size", "initial_local_batch_size")},
    learning_rate=0.006,
    evaluate_every_s=0.5,
)
_RESNET20: Changes = {"workload": "cifar10-resnet20", "optimizer": "sgd", "learning_rate": 0.2, "weight_decay": 1e-4}
"""The rate as published: 0.1 for 128 samples."""
_VGG11: Changes = {"workload": "cifar10-vgg11", "optimizer": "sgd", "learning_rate": 0.04, "weight_decay": 5e-4}
"""It has no norm: at a rate of 0.1 it is at 20 % after 70,000 samples."""
_VGG11_ADAM: Changes = {"workload": "cifar10-vgg11", "optimizer": "adam", "learning_rate": 0.0005}


EXPERIMENTS: Mapping[str, Experiment] = {
    "static": Experiment(
        "static 32, 64 and 128 per worker with SGD, and the default policy",
        (),
        [Group((), "image-sgd", (*STATICS, "rule"), IMAGE)],
        panels=("image-sgd",),
    ),
    "adam": Experiment(
        "the policy learned with SGD, unchanged, on the same job with Adam",
        ("job",),
        [
            Group(("SGD, as learned",), "image-sgd", (PAPER, *LEARNED_ROWS), IMAGE, (_ON_IMAGES,)),
            Group(("Adam, unchanged",), "image-adam", (PAPER, *LEARNED_ROWS), {**IMAGE, **ADAM}, (_ON_IMAGES,)),
        ],
    ),
    "workers": Experiment(
        "8 to 128 workers of the same four speeds",
        ("workers",),
        [Group((count,), f"n{count}", ROWS, {"num_workers": count}) for count in (8, 16, 32, 64, 128)],
    ),
    "transfer": Experiment(
        "policies learned with one model, SGD and 8 workers, unchanged, elsewhere",
        ("job",),
        [
            Group(("as learned",), "home", _HOME_ROWS, {}, _BOTH),
            Group(
                ("28 x 28 MLP",),
                "other-image",
                _HOME_ROWS,
                {"workload": "fashion-28-mlp", "target_accuracy": 0.875},
                _BOTH,
            ),
            Group(("Transformer",), "text", _HOME_ROWS, TEXT, _BOTH),
            Group(("Adam",), "adam", _HOME_ROWS, ADAM, _BOTH),
            Group(("128 workers",), "many", _HOME_ROWS, {"num_workers": 128}, _BOTH),
        ],
    ),
    "sensitivity": Experiment(
        "the weights of the published reward, and the window", ("parameter", "value"), _sensitivity()
    ),
    "topology": Experiment(
        "ring all-reduce against parameter servers, on a network of 1 Gbit/s with gradients of 8 MB",
        ("network",),
        [
            Group(("ring all-reduce",), "ring-all-reduce", ROWS, _slow_network()),
            Group(
                ("1 parameter server",),
                *("1-parameter-server", ROWS, _slow_network(topology="parameter-server", num_servers=1)),
            ),
            Group(
                ("8 parameter servers",),
                *("8-parameter-servers", ROWS, _slow_network(topology="parameter-server", num_servers=8)),
            ),
        ],
    ),
    "reward": Experiment("why the published reward does what it does", ("reward",), _rewards()),
    "paper-transformer": _TEXT,
    "paper-resnet20": _paper("paper-resnet20", 800_000, **_RESNET20),
    "paper-vgg11": _paper("paper-vgg11", 400_000, **_VGG11),
    "paper-vgg11-adam": _paper("paper-vgg11-adam", 400_000, **_VGG11_ADAM),
    "paper-workers": _TEXT._replace(
        titles=("workers",),
        groups=[
            Group((count,), f"paper-workers-{count}", PAPER_ROWS, {**_TEXT.groups[0].cluster, "num_workers": count})
            for count in (16, 32)
        ],
    ),
}

EVALUATIONS: Mapping[str, Sequence[str]] = {
    "heldout": ("--seeds", "6", "--rows", str(ROOT / "scenarios/rows/heldout.toml")),
    "exchange-heldout": ("--exchange", "local", "--rows", str(ROOT / "scenarios/rows/exchange.toml")),
    "varying-heldout": (
        *("--scenarios", "varying/heldout", "--policies", "static:track=1,local_batch_size=64,rule:against=1"),
        *("--seeds", "10"),
    ),
    "varying-bounds": (
        *("--scenarios", "varying/heldout", "--rows", str(ROOT / "scenarios/rows/varying.toml")),
        *("--seeds", "3"),
    ),
    "links-heldout": (
        *("--scenarios", str(ROOT / "scenarios/links/heldout"), "--rows", str(ROOT / "scenarios/rows/links.toml")),
        *("--seeds", "4"),
    ),
    "published-heldout": (
        *("--scenarios", "published/heldout", "--rows", str(ROOT / "scenarios/rows/published.toml")),
        *("--seeds", "5"),
    ),
}
"""Held-out comparisons, as arguments of `dynamix evaluate`."""


# --- running them ----------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """How much is run."""

    name: str
    num_seeds: int
    num_policy_seeds: int
    num_updates: int
    """Updates of each learning, on the surrogate."""


SCALES = {
    "smoke": Scale("smoke", num_seeds=2, num_policy_seeds=1, num_updates=2),
    "reduced": Scale("reduced", num_seeds=6, num_policy_seeds=3, num_updates=100),
    "full": Scale("full", num_seeds=12, num_policy_seeds=5, num_updates=200),
}
COLUMNS = ["median time to target, s", "missed", "accuracy at fixed time", "test accuracy", "mean local batch"]


class LearningRun(NamedTuple):
    """A policy that was learned, with the course of its learning."""

    path: str
    history: list[LearningUpdate]


class Laboratory:
    """Runs episodes and learns policies; what was done before is not done again."""

    def __init__(self, scale: Scale, directory: Path, jobs: int, data: Path | None, *, known: bool = False) -> None:
        """`known`: nothing is run, tables have what was run before."""
        self.scale, self._directory, self._jobs, self._data, self._known = scale, directory, jobs, data, known
        chosen = scenario_root() / TUNED_FILE
        self.tuned_by_family = read_tuned(chosen) if chosen.exists() else Tuned()
        """Choices of `dynamix evaluate tune`, for experiments on its own scenarios."""
        self._tuned = Tuned(overall=self.tuned_by_family.overall)
        """Its choices over all families: the clusters of most experiments are no family of its."""
        directory.mkdir(parents=True, exist_ok=True)

    def cluster(self, name: str, changes: Changes) -> Scenario:
        """A cluster with as many workers of each speed, on a fast network; any key of a scenario can be changed."""
        own = dict(changes)
        if self.scale.name == "smoke":
            own |= SMOKE
        count = own.pop("num_workers", 8) // len(SPEEDS)
        scenario = Scenario(
            family=name,
            name=name,
            workload="fashion-14-mlp",
            workers=tuple(Workers(samples_per_s=speed, count=count, overhead_s=0.002) for speed in SPEEDS),
            learning_rate=LEARNING_RATES[own.get("optimizer", "sgd")],
            base_global_batch_size=512,
            initial_local_batch_size=64,
            target_accuracy=0.86,
            fixed_time_s=10.0,
            time_limit_s=240.0,
            evaluate_every_s=0.25,
            evaluation_samples=5000,
            noise_every=4,
            network=Network(gradient_bytes=8_000_000),
            stragglers=Stragglers(jitter=0.05),
        )
        made = msgspec.structs.replace(scenario, **own)
        workload_named(made.workload).load(self._data)  # what is missing is reported before hours of learning
        return made

    def compare(
        self,
        scenarios: Iterable[Scenario],
        labels: Iterable[str],
        learned: Mapping[str, Sequence[LearningRun]] = MappingProxyType({}),
        *,
        tuned: Tuned | None = None,
        num_samples: int = 0,
    ) -> OutcomeTable:
        """Run rows in scenarios under all seeds, to a number of samples if one is given."""
        files = {policy: tuple(run.path for run in runs) for policy, runs in learned.items()}
        suite = Suite(name="results", scenarios=tuple(scenarios))
        rows = [
            msgspec.structs.replace(row, files=files.get(row.policy, ()))
            for row in parse_rows(",".join(map(_row_text, labels)))
        ]
        cells = plan(suite, rows, range(self.scale.num_seeds), tuned or self._tuned)
        line = ProgressLine(30.0)

        def show(num_done: int, num_total: int, newest: str) -> None:
            line.show(f"  {num_done}/{num_total} runs; newest: {newest}")

        with Ledger(self._directory / "runs.jsonl") as ledger:
            if num_samples and not self._known:
                run_to(num_samples, cells, ledger, self._directory, self._data)
            elif not self._known:
                fill(cells, ledger, jobs=self._jobs, data=self._data, on_progress=show)
            return OutcomeTable(suite.scenarios, cells, ledger, rows)

    def learned(self, wanted: Learning) -> list[LearningRun]:
        """A policy learned once per policy seed; a killed learning goes on where it was."""
        num_updates = self.scale.num_updates
        changes = {"num_updates": num_updates, "validate_every": num_updates, **wanted.plan}
        scenarios = (as_published(wanted.policy, self.cluster(wanted.name, wanted.cluster)),)
        return [self._learned(wanted.policy, scenarios, seed, changes) for seed in range(self.scale.num_policy_seeds)]

    def _learned(self, policy: str, scenarios: tuple[Scenario, ...], seed: int, changes: Changes) -> LearningRun:
        """The last version counts: validation chooses nothing here."""
        wanted = plan_named(policy, scenarios, seed=seed, num_score_seeds=1, **changes)
        stem = self._directory / f"{policy}-{wanted.digest[:12]}-{code_digest()[:12]}"
        path, history = stem.with_suffix(".safetensors"), stem.with_suffix(".history.json")
        if not (path.exists() and history.exists()):
            print(f"  learning {stem.name}: {wanted.num_updates} updates", flush=True)
            checkpoint = stem.with_suffix(".checkpoint")
            done = learn(
                wanted, num_workers=self._jobs, checkpoint=checkpoint, data=self._data, observer=lambda *_: None
            )
            path.write_bytes(done.file.to_bytes())
            history.write_bytes(msgspec.json.encode(done.history))
        return LearningRun(str(path), msgspec.json.decode(history.read_bytes(), type=list[LearningUpdate]))


def _row_text(label: str) -> str:
    """A row as `dynamix evaluate` takes it, from its label in tables: `goodput+track@32`."""
    label, _, exchange = label.partition("/exchange=")
    head, _, size = label.partition("@")
    name, _, options = head.partition(":")
    name, track, _ = name.partition("+track")
    keys = [
        *(["track=1"] if track else []),
        *([options] if options else []),
        *([f"local_batch_size={size}"] if size else []),
        *([f"exchange={exchange}"] if exchange else []),
    ]
    return f"{name}:{','.join(keys)}" if keys else name


Result = tuple[Table, list[Panel]]


def run_experiment(name: str, experiment: Experiment, laboratory: Laboratory) -> Result:
    """Learn and run what is not known yet; the rows of all groups."""
    rows, panels = list[list[Cell]](), list[Panel]()
    groups = experiment.groups[:1] if laboratory.scale.name == "smoke" and name == "workers" else experiment.groups
    notes = [f"Seeds 0 to {laboratory.scale.num_seeds - 1}, scale {laboratory.scale.name}; brackets: 95 % interval."]
    num_samples = min(experiment.num_samples, 10_000 if laboratory.scale.name == "smoke" else sys.maxsize)
    for group in groups:
        scenario = laboratory.cluster(group.name, group.cluster)
        learned = {one.policy: laboratory.learned(one) for one in group.learned}
        table = laboratory.compare([scenario], group.rows, learned, num_samples=num_samples)
        for label in (label for label in group.shown or group.rows if table.outcomes(label, [scenario.family])):
            own: list[Cell] = [*group.titles, *([] if group.shown else [label])]
            rows.append([*own, *(_level_cells if num_samples else _cells)(table, label, scenario, experiment.levels)])
        if group.name in experiment.panels:
            panels.append(_accuracy_panel(table, group.rows, scenario))
    titles = [*experiment.titles, *([] if experiment.groups[0].shown else ["policy"])]
    columns = [*COLUMNS, f"time vs {BASE}"]
    if num_samples:
        notes.append(f"Times are those to a validation accuracy; each run ended after {num_samples:,} samples.")
        columns = [f"{what}{level:.0%}" for what in ("s to ", f"vs {BASE} to ") for level in experiment.levels]
        columns += ["test accuracy", "s in all", "mean local batch"]
    return Table(name, [*titles, *columns], rows, notes), panels


def _level_cells(table: OutcomeTable, label: str, scenario: Scenario, levels: Sequence[float]) -> list[Cell]:
    """Median times to some accuracies, and their ratios; nothing where a run did not get there."""

    def reached(run: RunOutcome, level: float) -> float:
        return next((at.time_s for at in run.evaluations if at.accuracy >= level), math.nan)

    runs, base = (table.outcomes(row, [scenario.family]) for row in (label, BASE))
    own, those = (np.median([[reached(run, at) for at in levels] for run in of], 0) for of in (runs, base))
    return [
        *(None if math.isnan(one) else float(one) for one in (*own, *own / those)),
        _interval(table.mean(label, [scenario.family], lambda run: run.test_accuracy)),
        statistics.fmean(run.virtual_time_s for run in runs),
        statistics.fmean(run.samples_seen / run.num_steps / scenario.world_size for run in runs),
    ]


def _cells(table: OutcomeTable, label: str, scenario: Scenario, _: Sequence[float]) -> list[Cell]:
    families = [scenario.family]
    outcomes = table.outcomes(label, families)
    sizes = [run.samples_seen / run.num_steps / scenario.world_size for run in outcomes]
    return [
        float(np.nanmedian(table.times(label, families))),
        f"{table.num_misses(label, families)} of {len(outcomes)}",
        _interval(table.mean(label, families, lambda run: run.accuracy_at_fixed_time)),
        _interval(table.mean(label, families, lambda run: run.test_accuracy)),
        float(np.mean(sizes)),
        _interval(table.ratio(label, BASE, families)),
    ]


def _interval(found: Any) -> Interval | None:
    return None if found is None else Interval(found.value, found.low, found.high)


def _accuracy_panel(table: OutcomeTable, labels: Sequence[str], scenario: Scenario) -> Panel:
    """Mean validation accuracy over virtual time."""
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    for label in labels:
        if not (runs := [curve for curve in table.curves(label, scenario.name) if curve]):
            continue
        times_s = np.linspace(0, max(curve[-1][0] for curve in runs), CURVE_POINTS)
        curves[label] = list(zip(times_s.tolist(), mean_curve(runs, times_s).tolist(), strict=True))
    return Panel(scenario.name, "virtual time [s]", "validation accuracy", curves, limit=scenario.target_accuracy)


# --- those with tables of their own ----------------------------------------------------------------------------------


def learning(laboratory: Laboratory) -> Result:
    """Learning by the published method with another reward, one curve per learning seed."""
    rows, curves = list[list[Cell]](), dict[str, Sequence[tuple[float, float]]]()
    for seed, run in enumerate(laboratory.learned(_ON_IMAGES)):
        returns = [update.mean_return for update in run.history]
        rows.append([seed, len(returns), statistics.fmean(returns[:5]), statistics.fmean(returns[-5:])])
        curves[f"learning seed {seed}"] = [(float(update.update), update.mean_return) for update in run.history]
    columns = ["learning seed", "updates", "return, first 5", "return, last 5"]
    return Table("learning", columns, rows), [Panel("Cumulative reward of a job", "update", "return", curves)]


def surrogate(laboratory: Laboratory) -> Result:
    """Rank correlation of constant settings between the surrogate, on which policies learn, and virtual clusters."""
    scenarios = suite_named("varying/train").scenarios
    if laboratory.scale.name == "smoke":
        scenarios = (msgspec.structs.replace(scenarios[0], **SMOKE),)
    rows = list[list[Cell]]()
    for scenario in scenarios:
        exchanges = EXCHANGES[: {"exact": 1, "lossy": 2, "local": len(EXCHANGES)}[scenario.exchange]]
        settings = list(product((8, 16, 32, 64, 128, 256), exchanges))
        labels = [f"static+track:every={every}{',codec=int8' * is_int8}@{size}" for size, (every, is_int8) in settings]
        table = laboratory.compare([scenario], labels)
        real_s = [statistics.geometric_mean(table.times(label, [scenario.family]).ravel()) for label in labels]
        own_s = constant_times(scenario, settings, seed=0, tracks=True)
        rows.append([scenario.name, len(settings), float(spearmanr(real_s, own_s).statistic)])
    return Table("surrogate", ["scenario", "settings", "rank correlation"], rows), []


ADAPTDL = "adaptdl"
ADAPTDL_ROWS = (
    *("best-static", ADAPTDL, f"{ADAPTDL}:slowest=1", f"{ADAPTDL}+track", f"{ADAPTDL}:slowest=1@32"),
    *(f"{ADAPTDL}+track@32", "goodput+track", "rule"),
)
ADAPTDL_SCENARIOS = ("mixed-8", "stragglers-8", "slow-link-8", "congestion-8", "adam-8", "homogeneous-8")


def adaptdl(laboratory: Laboratory) -> Result:
    """AdaptDL's published goodput code (bench/adaptdl) on train scenarios, dividing equally and with our fast loop."""
    if ADAPTDL not in extension_names("dynamix.policies"):
        raise BenchmarkError("AdaptDL's package is not installed: run this experiment with `make adaptdl`")
    known = {scenario.name: scenario for scenario in suite_named("train").scenarios}
    scenarios = [known[name] for name in ADAPTDL_SCENARIOS]
    if laboratory.scale.name == "smoke":
        scenarios = [msgspec.structs.replace(scenarios[0], **SMOKE)]
    table = laboratory.compare(scenarios, ADAPTDL_ROWS, tuned=laboratory.tuned_by_family)
    families, rows = [scenario.family for scenario in scenarios], list[list[Cell]]()
    for label in ADAPTDL_ROWS:
        sizes = [
            run.samples_seen / run.num_steps / scenario.world_size
            for scenario in scenarios
            for run in table.outcomes(label, [scenario.family])
        ]
        rows.append(
            [
                *(label, *(_interval(table.ratio(label, base, families)) for base in ("best-static", "goodput+track"))),
                *(f"{table.num_misses(label, families)} of {len(sizes)}", float(np.mean(sizes))),
                *(_interval(table.ratio(label, "best-static", [family])) for family in families),
            ]
        )
    columns = ["policy", "vs best static", "vs goodput+track", "missed", "mean local batch", *families]
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("adaptdl", "autograd"))
    return Table(ADAPTDL, columns, rows, [packages]), []


OTHERS: Mapping[str, Callable[[Laboratory], Result]] = {
    "learning": learning,
    "surrogate": surrogate,
    ADAPTDL: adaptdl,
}


def evaluated(name: str, options: argparse.Namespace) -> Result:
    """Run `dynamix evaluate` on the held-out scenarios; every policy over all families and in each."""
    path, image = options.work / f"{name}.json", options.csv / f"{name}.png"
    options.csv.mkdir(parents=True, exist_ok=True)
    arguments = ["evaluate", "--results", str(options.work / f"{name}.jsonl"), *EVALUATIONS[name]]
    arguments += ["--json", str(path), "--png", str(image), "--jobs", str(options.jobs)]
    if options.seeds:
        arguments += ["--seeds", str(options.seeds)]
    if code := dynamix(arguments):
        raise BenchmarkError(f"dynamix {' '.join(arguments)} ended with code {code}")
    verdict = msgspec.json.decode(path.read_bytes(), type=Verdict)
    bases = verdict.against or ["best-static", "goodput"]
    places = {"heterogeneous": verdict.policies, **{name: one.policies for name, one in verdict.families.items()}}
    rows: list[list[Cell]] = []
    for place, policies in places.items():
        for row in policies:
            ratios = [_interval(row.ratios[base]) for base in bases]
            rows.append(
                [place, row.policy, row.median_time_to_target_s, row.misses, row.num_runs, row.test_accuracy, *ratios]
            )
    columns = ["families", "policy", "median time to target, s", "missed", "runs", "test accuracy"]
    return Table(name, [*columns, *(f"over {base}" for base in bases)], rows, [verdict.command]), []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 2 when data or a package is missing."""
    made = argparse.ArgumentParser(
        prog="python -m bench.virtual", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*EVALUATIONS, *EXPERIMENTS, *OTHERS]
    made.add_argument("--only", action="append", choices=names, help="an experiment; may be repeated")
    made.add_argument("--scale", choices=SCALES, default="reduced", help="(default: %(default)s)")
    made.add_argument("--seeds", type=int, default=0, help="scenario seeds (default: as the scale has it)")
    made.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    made.add_argument("--data", type=Path, help="directory with the data sets (default: the usual places)")
    made.add_argument("--csv", type=Path, default=ROOT / "docs" / "results", help="(default: docs/results)")
    made.add_argument("--work", type=Path, default=ROOT / "out" / "virtual", help="keeps runs (default: out/virtual)")
    made.add_argument("--known", action="store_true", help="run nothing: the rows that were run before")
    options = made.parse_args(arguments)
    scale = SCALES[options.scale]
    scale = scale._replace(num_seeds=options.seeds or scale.num_seeds)
    laboratory = Laboratory(scale, options.work / options.scale, options.jobs, options.data, known=options.known)
    usual = [name for name in EXPERIMENTS if not name.startswith("paper-")] + ["learning"]
    for name in options.only or usual:
        about = EXPERIMENTS[name].about if name in EXPERIMENTS else (OTHERS[name].__doc__ if name in OTHERS else "")
        print(f"{name}: {about}", flush=True)
        try:
            if name in EVALUATIONS:
                table, panels = evaluated(name, options)
            elif name in EXPERIMENTS:
                table, panels = run_experiment(name, EXPERIMENTS[name], laboratory)
            else:
                table, panels = OTHERS[name](laboratory)
        except (MissingDataError, BenchmarkError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        print(f"\n{table.markdown()}\n", flush=True)
        table.write(options.csv)
        if panels:
            draw(panels, options.csv / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
