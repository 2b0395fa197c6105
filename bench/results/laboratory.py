"""What all experiments share: runs that are kept, policies that are learned once, and how much of each."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from bench.harness.figure import Curve

from dynamix.arbitrator.deciding.signatures import Finding
from dynamix.lab.experiments.comparison.contenders import parse_contenders
from dynamix.lab.experiments.comparison.evaluation import TYPICAL_RUN_S, ComparisonProgress, estimate, fill, plan
from dynamix.lab.experiments.comparison.outcomes import OutcomeTable
from dynamix.lab.experiments.comparison.runs import Ledger, as_published
from dynamix.lab.experiments.comparison.tuned import Tuned, read_tuned
from dynamix.lab.experiments.episodes.provenance import code_digest, versions
from dynamix.lab.experiments.episodes.suite import TUNED_FILE, Suite, scenario_root
from dynamix.lab.experiments.learning import LearningPlan, LearningUpdate, learn, plan_named
from dynamix.lab.simulator.scenario import Network, Scenario, Stragglers, Workers
from dynamix.lab.workloads import workload_named
from dynamix.runtime import output_files
from dynamix.schemas.messages.policies import DEFAULT_POLICY

from .result import Cell, ExperimentResult

SPEEDS = (4000.0, 2000.0, 1000.0, 500.0)
"""Samples per second of the four kinds of workers."""
OVERHEAD_S = 0.002
LINE_EVERY_S = 30.0
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
"""Learning rates for a global batch of 512, as in the scenarios."""


class Scale(NamedTuple):
    """How much is run."""

    name: str
    num_seeds: int
    num_policy_seeds: int
    num_episodes: int
    """Episodes of each learning."""


SCALES = {
    "smoke": Scale("smoke", num_seeds=2, num_policy_seeds=1, num_episodes=2),
    "reduced": Scale("reduced", num_seeds=6, num_policy_seeds=3, num_episodes=20),
    "full": Scale("full", num_seeds=12, num_policy_seeds=5, num_episodes=120),
}
"""`smoke` only shows that an experiment runs; `reduced` takes minutes on a core each; `full` hours, or a GPU."""


IMAGE_JOB = {
    "workload": "cifar10-vgg11",
    "target_accuracy": 0.75,
    "fixed_time_s": 300.0,
    "time_limit_s": 3000.0,
    "evaluate_every_s": 10.0,
    "network": Network(),  # gradients as large as the model's own
}
STAND_IN = {"workload": "fashion-14-cnn", "target_accuracy": 0.82, "time_limit_s": 90.0}
STAND_IN_NOTE = (
    "Reduced: the small CNN on 14 x 14 Fashion-MNIST stands in for VGG11 on CIFAR-10, whose step takes seconds on a "
    "core. The full one: `python -m bench.results --only {name} --scale full`; as a real job on GPUs: `dynamix train "
    "-- --standalone --nproc-per-node 8 examples/ddp_workload.py --workload cifar10-vgg11`."
)
SMOKE = {
    "workload": "fashion-14-mlp",
    "num_train_samples": 2000,
    "evaluation_samples": 500,
    "target_accuracy": 0.8,
    "fixed_time_s": 1.0,
    "time_limit_s": 6.0,
    "evaluate_every_s": 0.25,
}


class LearningRun(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that was learned, with the course of its learning."""

    path: str
    history: list[LearningUpdate]

    @property
    def elapsed_s(self) -> float:
        """Wall-clock time of the learning."""
        return self.history[-1].elapsed_s

    @property
    def virtual_s(self) -> float:
        """Time that the virtual clusters spent in its episodes."""
        return sum(sum(update.times_s) for update in self.history)


class Laboratory:
    """Runs episodes and learns policies; what was done before is not done again."""

    def __init__(self, scale: Scale, directory: Path, *, jobs: int = 1, data: Path | None = None) -> None:
        self.scale = scale
        self.seeds = list(range(scale.num_seeds))
        self.policy_seeds = list(range(scale.num_policy_seeds))
        self._directory = directory
        self._jobs = jobs
        self._data = data
        chosen = scenario_root() / TUNED_FILE
        self.tuned_by_family = read_tuned(chosen) if chosen.exists() else Tuned()
        """What `dynamix tune` chose, for experiments on its own scenarios."""
        self.tuned = Tuned(overall=self.tuned_by_family.overall)
        """What it chose over all families: the clusters of most experiments are no family of its."""
        self._core_s = 0.0
        """What the runs of the experiment under way took, of one core."""
        directory.mkdir(parents=True, exist_ok=True)

    def check_data(self, scenario: Scenario) -> None:
        """Read the data of a scenario, for experiments whose data no other one needs.

        Raises:
            MissingDataError: when it is not there; the text says how to get it.
        """
        workload_named(scenario.workload).load(self._data)

    def cluster(self, name: str, **changes: Any) -> Scenario:
        """A mixed cluster; a tiny job on it where only to show that an experiment runs."""
        return mixed(name, **(changes | (SMOKE if self.scale.name == "smoke" else {})))

    def image_job(self, name: str, **changes: Any) -> Scenario:
        """The paper's first workload, VGG11 on CIFAR-10, or what stands in for it."""
        return self.cluster(name, **(IMAGE_JOB if self.scale.name == "full" else STAND_IN), **changes)

    def image_notes(self, name: str) -> list[str]:
        """What stands in for what in an experiment with the image job."""
        return [] if self.scale.name == "full" else [STAND_IN_NOTE.format(name=name)]

    def tuning_note(self, labels: Iterable[str]) -> str:
        """A sentence on the settings of rows that `dynamix tune` chooses for; the default policy runs as it ships."""
        choices = {
            row.label: self.tuned.overall.get(row.policy)
            for row in parse_contenders(",".join(labels))
            if row.policy != DEFAULT_POLICY
        }
        chosen = [f"`{label}` as `{found.setting}`" for label, found in choices.items() if found and found.options]
        if not chosen:
            return "Nothing was tuned: every policy runs with its default options."
        return f"Chosen over all train scenarios by `dynamix tune`: {', '.join(chosen)}."

    def compare(
        self,
        scenarios: Iterable[Scenario],
        labels: Iterable[str],
        learned: Mapping[str, Sequence[LearningRun]] | None = None,
        *,
        tuned: Tuned | None = None,
        seeds: Sequence[int] | None = None,
        typical_run_s: float = TYPICAL_RUN_S,
    ) -> OutcomeTable:
        """Run contenders in scenarios, among them policies that were learned, under all seeds or the given ones.

        `typical_run_s` is what a run is taken to need of a core before there was one in its family.
        """
        files = {policy: [run.path for run in runs] for policy, runs in (learned or {}).items()}
        suite = Suite(name="results", scenarios=tuple(scenarios))
        contenders = parse_contenders(",".join(labels), files)
        cells = plan(suite, contenders, seeds or self.seeds, tuned or self.tuned)
        with Ledger(self._directory / "runs.jsonl") as ledger:
            print(f"  {estimate(cells, ledger, typical_run_s=typical_run_s).text(self._jobs)}", flush=True)
            fill(cells, ledger, jobs=self._jobs, data=self._data, on_progress=_RunLines().show)
            tasks = {cell.task.key: cell.task for cell in cells}
            self._core_s += sum(found.wall_s for task in tasks.values() if (found := ledger.get(task)) is not None)
            return OutcomeTable(suite.scenarios, cells, ledger, contenders)

    def learned(self, policy: str, scenarios: Sequence[Scenario], **changes: Any) -> list[LearningRun]:
        """A policy learned on scenarios, once per policy seed; a killed learning goes on where it was."""
        sized = {"num_episodes": self.scale.num_episodes} | changes
        sized["validate_every"] = sized["num_episodes"]  # validation steers nothing here: the last version counts
        bounded = tuple(as_published(policy, scenario) for scenario in scenarios)
        return [
            self._learned(plan_named(policy, bounded, seed=seed, num_score_seeds=1, select="last", **sized))
            for seed in self.policy_seeds
        ]

    def curves(self, learned: Sequence[LearningRun], value: Callable[[LearningUpdate], float]) -> list[Curve]:
        """A figure of every update, one curve per learning seed."""
        return [
            Curve(
                label=f"learning seed {seed}",
                points=[(float(update.num_episodes), value(update)) for update in run.history],
            )
            for seed, run in zip(self.policy_seeds, learned, strict=True)
        ]

    def result(
        self, name: str, columns: list[str], rows: list[list[Cell]], *, learned: bool = False, **more: Any
    ) -> ExperimentResult:
        """A result with its origin; what is counted of its cost begins again."""
        core_minutes, self._core_s = self._core_s / 60, 0.0
        seeds = "" if self.scale == SCALES[self.scale.name] else f" --seeds {self.scale.num_seeds}"
        return ExperimentResult(
            name=name,
            command=f"python -m bench.results --only {name} --scale {self.scale.name}{seeds}",
            scale=self.scale.name,
            seeds=self.seeds,
            policy_seeds=self.policy_seeds if learned else [],
            columns=columns,
            rows=rows,
            code=code_digest(),
            versions=versions(),
            core_minutes=core_minutes,
            **more,
        )

    def _learned(self, plan_: LearningPlan) -> LearningRun:
        stem = self._directory / f"{plan_.policy}-{plan_.digest[:12]}-{code_digest()[:12]}"
        path, history = stem.with_suffix(".safetensors"), stem.with_suffix(".history.json")
        if not (path.exists() and history.exists()):
            minutes = max(1, round(plan_.num_episodes * TYPICAL_RUN_S / 60 / self._jobs))
            print(f"learning {stem.name}: {plan_.num_episodes} episodes, some {minutes} minutes", flush=True)
            done = learn(
                plan_,
                num_workers=self._jobs,
                checkpoint=stem.with_suffix(".checkpoint"),
                data=self._data,
                observer=_UpdateLines(plan_).show,
            )
            output_files.write(path, done.file.to_bytes())
            output_files.write(history, msgspec.json.encode(done.history))
        done_before = msgspec.json.decode(history.read_bytes(), type=list[LearningUpdate])
        self._core_s += self._jobs * done_before[-1].elapsed_s
        return LearningRun(path=str(path), history=done_before)


def mixed(name: str, *, num_workers: int = 8, **changes: Any) -> Scenario:
    """A cluster with as many workers of each speed, on a fast network; any key of a scenario can be changed."""
    scenario = Scenario(
        family=name,
        name=name,
        workload="fashion-14-mlp",
        workers=tuple(
            Workers(samples_per_s=speed, count=num_workers // len(SPEEDS), overhead_s=OVERHEAD_S) for speed in SPEEDS
        ),
        learning_rate=LEARNING_RATES[changes.get("optimizer", "sgd")],
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
    return msgspec.structs.replace(scenario, **changes)


class _RunLines:
    """Prints how far a comparison is: a line for the first run, for the last, and at most twice a minute between."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def show(self, progress: ComparisonProgress) -> None:
        """Print the line, if one is due."""
        if time.monotonic() < self._next_s and progress.num_done < progress.num_total:
            return
        self._next_s = time.monotonic() + LINE_EVERY_S
        left = "" if progress.left_s is None else f", {progress.left_s / 60:.0f} minutes left"
        print(f"  {progress.num_done}/{progress.num_total} runs{left}; newest: {progress.newest}", flush=True)


class _UpdateLines:
    """Prints how far a learning is: a line for the last update, and at most twice a minute one before."""

    def __init__(self, plan_: LearningPlan) -> None:
        self._plan = plan_
        self._next_s = 0.0

    def show(self, row: LearningUpdate, begun: Sequence[Finding]) -> None:  # noqa: ARG002 - an observer's arguments
        """Print the line, if one is due."""
        if time.monotonic() < self._next_s and row.update < self._plan.num_updates:
            return
        self._next_s = time.monotonic() + LINE_EVERY_S
        speed = f"{row.num_episodes / row.elapsed_s:.2f} episodes/s"
        done = f"{row.num_episodes}/{self._plan.num_episodes} episodes, {speed}"
        print(f"  {done}; {row.vs_rule:.3f} of rule's time, entropy {row.entropy:.2f}", flush=True)
