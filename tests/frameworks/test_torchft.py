"""Replica groups under torchft that are killed and come back: the others go on, and each sample counts once."""

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed: make test-frameworks")
from tests.frameworks.torchft_job import GLOBAL_BATCH_SIZE, NUM_SAMPLES, made_model
from tests.support.control_plane import control_plane

from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED
from dynamix.trainer import attach

coordination = pytest.importorskip("torchft.coordination")


class Group:
    """A process, and the lines of all processes of this group, which a thread reads: a full pipe would block it."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "tests.frameworks.torchft_job", *arguments]
        self.lines: list[dict[str, Any]] = []
        self._new: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self, dies_in: int, environ: Mapping[str, str]) -> None:
        ours = {"GLOO_SOCKET_IFNAME": "lo", "DYNAMIX_TRAINER_SUMMARY": "false", "OMP_NUM_THREADS": "1"}
        environ, root = {**os.environ, **environ, **ours}, Path(__file__).parents[2]
        command = [*self._command, str(dies_in)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environ)
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                if line.startswith("{") and line.endswith("}\n"):
                    self.lines.append(json.loads(line))
                    self._new.put(self.lines[-1])

    def read_until(self, num_groups: int, *, other_than: int = 0) -> int:
        """Read up to a step of so many groups with another global batch, which is returned."""
        line: dict[str, Any] = {}
        while len(line.get("sizes", ())) != num_groups or sum(line["sizes"]) == other_than:
            line = self._new.get(timeout=60)
        return sum(line["sizes"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"base_global_batch_size": None}, "name base_global_batch_size"),
        ({"max_local_batch_size": "auto"}, "name a max_local_batch_size"),
        ({"max_local_batch_size": 23}, "name a max_local_batch_size"),
        ({"look_ahead": 1, "count_tokens": len}, "leave look_ahead=1, count_tokens=.* out"),
    ],
)
def test_what_changing_groups_cannot_do_is_refused(given: dict[str, Any], fix: str) -> None:
    dataset, model, optimizer = made_model()
    mode = SimpleNamespace(name="DYNAMIC")
    known = {"_use_async_quorum": False, "_replica_world_size_mode": mode, "_group_world_size": 1}
    manager = SimpleNamespace(**known, _min_replica_size=2, _pg=None)
    with pytest.raises(ValueError, match=f"under a torchft Manager: {fix}"):
        attach(model, optimizer, dataset, manager=manager, **{"base_global_batch_size": 48} | given)


def _train(groups: list[Group], num_kills: int, dies_in: int, environ: Mapping[str, str], *, is_steered: bool) -> None:
    """Train to the end; the last group is killed and started again, where there are decisions once one was adopted."""
    first, second, victim = groups
    first.start(0, environ)
    second.start(0, environ)
    for left in reversed(range(num_kills + 1)):
        victim.start(dies_in if left else 0, environ)
        for num_groups in (3, 2) if left else (3,):
            size = first.read_until(num_groups)
            if is_steered:
                first.read_until(num_groups, other_than=size)
        if left:
            victim.kill()
    assert [group.process.wait(timeout=100) for group in groups] == [0, 0, 0]


@pytest.mark.parametrize(
    ("policy", "victim", "num_kills", "num_epochs"),
    [
        pytest.param("split", 2, 1, 12, marks=pytest.mark.timeout(120)),
        pytest.param("split", 2, 10, 60, marks=[pytest.mark.slow, pytest.mark.timeout(280)]),
        pytest.param("rule", 2, 1, 40, marks=pytest.mark.timeout(180)),
        pytest.param("rule", 0, 1, 40, marks=pytest.mark.timeout(180)),  # rank 0 reports and hears decisions
    ],
)
async def test_a_group_that_dies_and_returns_leaves_each_step_the_gradient_of_one_big_batch(
    policy: str, victim: int, num_kills: int, num_epochs: int
) -> None:
    is_steered = policy == "rule"
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500, heartbeat_timeout_ms=1000
    )
    numbers = sorted(range(3), key=lambda number: number == victim)
    groups = [Group(str(number), lighthouse.address(), str(num_epochs), policy) for number in numbers]
    dies_in = 23 if is_steered else 5  # in its fifth window: the third is the first that can be steered
    async with control_plane(*(["collector", "arbitrator"] if is_steered else [])) as plane:
        environ = {**plane.environ, "DYNAMIX_JOB": "groups"}
        try:
            await asyncio.to_thread(_train, groups, num_kills, dies_in, environ, is_steered=is_steered)
        finally:
            for group in groups:
                group.kill()
            lighthouse.shutdown()
        applied: list[Any] = await plane.messages(FEED.name, subjects.of("applied", "groups"))
    ends = [group.lines.pop() for group in groups]
    lines = [line for group in groups for line in group.lines]
    commits = [line for line in lines if "committed" in line]
    drawn: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if "drawn" in line:
            drawn.setdefault(tuple(line["drawn"]), []).append(line)
    # a step that one group has committed before it died is made again by the others
    generation_of = {step: generation for generation, step in sorted(line["committed"] for line in commits)}
    assert sorted(generation_of) == list(range(len(generation_of)))
    decided = {each.effective_step: sum(each.local_batch_sizes) for each in applied}
    size, size_at = GLOBAL_BATCH_SIZE, {}
    for at in sorted({tuple(line["committed"]) for line in commits}):
        size = size_at[at] = decided.get(at[1], size)  # without a decision it stays, whoever comes or goes
    assert {(*line["committed"], sum(line["sizes"])) for line in commits} == {(*at, size_at[at]) for at in size_at}
    if is_steered:  # a speed that is not known yet is taken to be like the others'
        back = next(line["sizes"] for line in commits if line["committed"][0] == max(size_at)[0])
        assert max(back) < 2 * min(back)
    by_epoch: dict[int, Counter[int]] = {}
    dataset, model, optimizer = made_model()
    for step, generation in sorted(generation_of.items()):
        parts = drawn[generation, step]
        samples = [sample for part in parts for sample in part["samples"]]
        by_epoch.setdefault(parts[0]["epoch"], Counter()).update(samples)
        features, targets, _ = dataset[samples]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
    assert by_epoch == {epoch: Counter(range(NUM_SAMPLES)) for epoch in range(num_epochs)}
    generations = [line["committed"][0] for line in groups[0].lines if "committed" in line]
    assert generations == sorted(generations)
    assert len(set(generations)) > 2 * num_kills  # left and came, each time
    num_drawn = sum("drawn" in line for line in groups[0].lines)
    assert ends[0]["repeated"] == num_drawn - len(generations) >= num_kills
    # the one that came back has the average of all, over all generations
    assert ends[2]["noise_windows"] == ends[0]["noise_windows"] > ends[0]["windows"]
    for end in ends:
        for found, expected in zip(end["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(
                torch.tensor(found, dtype=torch.float64), expected.detach(), rtol=1e-9, atol=1e-9
            )
