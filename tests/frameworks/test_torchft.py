"""Replica groups under torchft that are killed and come back: the others go on, and each sample counts once."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed: make test-frameworks")
from tests.frameworks.torchft_job import GLOBAL_BATCH_SIZE, NUM_SAMPLES, made_model

from dynamix.trainer import attach

coordination = pytest.importorskip("torchft.coordination")


class Group:
    """A process, and the lines of all processes of this group, which a thread reads: a full pipe would block it."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "tests.frameworks.torchft_job", *arguments]
        self.lines: list[dict[str, Any]] = []
        self._new: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self, how: str) -> None:
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "DYNAMIX_TRAINER_SUMMARY": "false", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen([*self._command, how], stdout=subprocess.PIPE, text=True, cwd=root, env=environ)
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                if line.startswith("{") and line.endswith("}\n"):
                    self.lines.append(json.loads(line))
                    self._new.put(self.lines[-1])

    def read_until(self, is_reached: Callable[[dict[str, Any]], bool]) -> None:
        while not is_reached(self._new.get(timeout=60)):
            pass

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


@pytest.mark.parametrize(
    ("num_kills", "num_epochs"),
    [
        pytest.param(1, 12, marks=pytest.mark.timeout(120)),
        pytest.param(10, 60, marks=[pytest.mark.slow, pytest.mark.timeout(280)]),
    ],
)
def test_a_group_that_dies_and_returns_leaves_each_step_the_gradient_of_one_big_batch(
    num_kills: int, num_epochs: int
) -> None:
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500, heartbeat_timeout_ms=1000
    )
    groups = [Group(str(number), lighthouse.address(), str(num_epochs)) for number in range(3)]
    try:
        first, second, victim = groups
        first.start("lives")
        second.start("lives")
        for left in reversed(range(num_kills + 1)):
            victim.start("dies" if left else "lives")
            first.read_until(lambda line: line.get("num_groups") == 3)
            if left:
                first.read_until(lambda line: line.get("num_groups") == 2)
                victim.kill()
        for group in groups:
            group.read_until(lambda line: "parameters" in line)
        assert [group.process.wait() for group in groups] == [0, 0, 0]
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()
    ends = [group.lines.pop() for group in groups]
    lines = [line for group in groups for line in group.lines]
    commits = [line for line in lines if "committed" in line]
    assert {line["batch"] for line in commits} == {GLOBAL_BATCH_SIZE}
    drawn: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if "drawn" in line:
            drawn.setdefault(tuple(line["drawn"]), []).append(line)
    # a step that one group has committed before it died is made again by the others
    generation_of = {step: generation for generation, step in sorted(line["committed"] for line in commits)}
    assert sorted(generation_of) == list(range(num_epochs * -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)))
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
    assert ends[2]["noise_windows"] == ends[0]["noise_windows"] > 0  # the one that came back has the average of all
    for end in ends:
        for found, expected in zip(end["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(
                torch.tensor(found, dtype=torch.float64), expected.detach(), rtol=1e-9, atol=1e-9
            )
