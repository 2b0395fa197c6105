"""Experiments with learned policies: the curve of the reward, another optimizer, another model, the cost."""

import statistics
from collections.abc import Sequence

from bench.harness.figure import Panel

from dynamix.lab.experiments.comparison.scores import MeanInterval
from dynamix.lab.experiments.learning import LearningUpdate
from dynamix.lab.simulator.scenario import Scenario

from .laboratory import IMAGE_JOB, Laboratory, LearningRun
from .result import BASE, COLUMNS, Cell, ExperimentResult, mean_of, rows_of, trend_of

PAPER = "ppo-paper"
OURS = "ppo"
FIRST_EPISODES = 5
"""The paper shows five; it says that the cumulative reward settles by about episode 15."""
REDUCED_EPISODES = 100
"""Episodes of the image job: twenty, as in the paper, are too few to see a trend."""
PER_EPISODES = 10
BASELINES = (BASE, "static@32", "static@128", "random", "rule")
OUR_EPISODES_RATIO = 8
"""Episodes of ours per episode of the paper's, and per update: as many updates."""
TRANSFER_COLUMNS = ["job", "policy", *COLUMNS]
REDUCED_TRANSFER = (
    "Reduced: learned on the 14 x 14 MLP, and the 28 x 28 MLP stands for the other depth; `--scale full` learns on "
    "ResNet-20 and moves to ResNet-32."
)
IMAGES = {name: value for name, value in IMAGE_JOB.items() if name != "workload"}
ADAM = {"optimizer": "adam"}
MANY_WORKERS = 128
"""Workers of the job that policies learned with 8 workers are applied to."""


def reward_curve(laboratory: Laboratory) -> ExperimentResult:
    """Episodes of learning by the published method with the published reward, one curve per learning seed."""
    learned = _on_images(laboratory)
    rows: list[list[Cell]] = []
    for seed, run in zip(laboratory.policy_seeds, learned, strict=True):
        ends = (run.history[:FIRST_EPISODES], run.history[-FIRST_EPISODES:])
        returns = [statistics.fmean(update.mean_return for update in updates) for updates in ends]
        times_s = (statistics.fmean(map(_time_s, updates)) for updates in ends)
        trend = trend_of([update.mean_return for update in run.history], per=PER_EPISODES)
        rows.append([seed, len(run.history), *returns, trend, *times_s])
    columns = ["learning seed", "episodes", "return, first 5", "return, last 5", f"rise per {PER_EPISODES} episodes"]
    columns += ["time to target, first 5, s", "last 5, s"]
    panels = [
        Panel(title=title, x="episode", y=y, curves=laboratory.curves(learned, value))
        for title, y, value in (
            ("Cumulative reward of an episode", "return", lambda update: update.mean_return),
            ("Time to target of an episode", "virtual time [s]", _time_s),
        )
    ]
    notes = [_verdict_of([row[4] for row in rows]), *laboratory.image_notes("learning")]
    return laboratory.result("learning", columns, rows, learned=True, panels=panels, notes=notes)


def other_optimizer(laboratory: Laboratory) -> ExperimentResult:
    """The policy learned with SGD, unchanged, on the same job with Adam."""
    learned = _on_images(laboratory)
    scenarios = {
        "SGD, as learned": laboratory.image_job("image-sgd"),
        "Adam, unchanged": laboratory.image_job("image-adam", **ADAM),
    }
    rows = _transferred(laboratory, scenarios, {PAPER: learned})
    notes = [*laboratory.image_notes("adam"), laboratory.tuning_note(BASELINES)]
    return laboratory.result("adam", TRANSFER_COLUMNS, rows, learned=True, notes=notes)


def other_models(laboratory: Laboratory) -> ExperimentResult:
    """Policies learned with one model, SGD and 8 workers, unchanged, with others, with Adam and with 128 workers."""
    full = laboratory.scale.name == "full"
    home = {"workload": "cifar10-resnet20"} if full else {}
    other = {"workload": "cifar10-resnet32"} if full else {"workload": "fashion-28-mlp", "target_accuracy": 0.875}
    images = IMAGES if full else {}
    text = {
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
    scenarios = {
        "as learned": laboratory.cluster("home", **(images | home)),
        "ResNet-32" if full else "28 x 28 MLP": laboratory.cluster("other-image", **(images | other)),
        "Transformer": laboratory.cluster("text", **text),
        "Adam": laboratory.cluster("adam", **(images | home | ADAM)),
        f"{MANY_WORKERS} workers": laboratory.cluster("many", num_workers=MANY_WORKERS, **(images | home)),
    }
    for scenario in scenarios.values():  # before the policies are learned, which takes longest
        laboratory.check_data(scenario)
    learned = _both(laboratory, scenarios["as learned"])
    notes = [*([] if full else [REDUCED_TRANSFER]), laboratory.tuning_note(BASELINES)]
    return laboratory.result(
        "transfer", TRANSFER_COLUMNS, _transferred(laboratory, scenarios, learned), learned=True, notes=notes
    )


def cost(laboratory: Laboratory) -> ExperimentResult:
    """What learning costs, and how many runs must be steered until it has paid."""
    scenario = laboratory.cluster("home")
    learned = _both(laboratory, scenario)
    table = laboratory.compare([scenario], ["rule", *learned], learned)
    rule_s = statistics.fmean(table.times("rule", [scenario.family]).ravel())
    rows: list[list[Cell]] = []
    for name, runs in learned.items():
        own_s = statistics.fmean(table.times(name, [scenario.family]).ravel())
        virtual_s = statistics.fmean(run.virtual_s for run in runs)
        rows.append(
            [
                name,
                runs[0].history[-1].num_episodes,
                mean_of([run.elapsed_s for run in runs]),
                mean_of([run.elapsed_s / run.history[-1].num_episodes for run in runs]),
                virtual_s,
                virtual_s / rule_s,
                own_s - rule_s,
                "never" if own_s >= rule_s else virtual_s / (rule_s - own_s),
            ]
        )
    columns = [
        "policy",
        "episodes",
        "wall clock, s",
        "per episode, s",
        "cluster time, s",
        "in runs of rule",
        "saved per run vs rule, s (negative: saved)",
        "runs until it has paid",
    ]
    note = (
        "Wall clock: the one figure here that depends on the machine. Cluster time: what the episodes would have "
        "taken on the virtual cluster itself. `rule` needs no learning."
    )
    return laboratory.result("cost", columns, rows, learned=True, notes=[note])


def _both(laboratory: Laboratory, scenario: Scenario) -> dict[str, list[LearningRun]]:
    """The paper's policy, and ours, which learns from more episodes, several at a time."""
    num_episodes = OUR_EPISODES_RATIO * laboratory.scale.num_episodes
    ours = laboratory.learned(OURS, [scenario], num_episodes=num_episodes, episodes_per_update=OUR_EPISODES_RATIO)
    return {PAPER: laboratory.learned(PAPER, [scenario]), OURS: ours}


def _on_images(laboratory: Laboratory) -> list[LearningRun]:
    num_episodes = REDUCED_EPISODES if laboratory.scale.name == "reduced" else laboratory.scale.num_episodes
    return laboratory.learned(PAPER, [laboratory.image_job("image-sgd")], num_episodes=num_episodes)


def _verdict_of(trends: Sequence[Cell]) -> str:
    """Whether the return rose, in a sentence."""
    known = [trend for trend in trends if isinstance(trend, MeanInterval) and trend.low is not None]
    risen = sum(trend.low > 0.0 for trend in known if trend.low is not None)
    fallen = sum(trend.high < 0.0 for trend in known if trend.high is not None)
    return (
        f"By straight lines through the returns of all episodes, the return rose under {risen} of {len(trends)} "
        f"learning seeds and fell under {fallen}, with intervals clear of 0."
    )


def _transferred(
    laboratory: Laboratory, scenarios: dict[str, Scenario], learned: dict[str, list[LearningRun]]
) -> list[list[Cell]]:
    """Rows of learned policies and baselines in several jobs, against static 64 in each."""
    labels = [*learned, *BASELINES]
    return rows_of(laboratory.compare(scenarios.values(), labels, learned), scenarios, labels)


def _time_s(update: LearningUpdate) -> float:
    """Mean time to target of the update's episodes."""
    return statistics.fmean(update.times_s)
