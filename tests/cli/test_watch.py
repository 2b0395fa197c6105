"""`dynamix watch`: what is said of steps whose times are known, and a script run as Python and torchrun run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.watched import watched_row

from dynamix.cli.watching import Watched
from dynamix.schemas.watching import Step

NUM_STEPS = 40
SIZE = 64


def watched(compute_s: list[float], *, comm_s: float = 0.004, data_s: list[float] | None = None) -> Watched:
    """A job of steps that are all alike."""
    made, data = Watched(), data_s or [0.0] * len(compute_s)
    longest_s = max(c + d for c, d in zip(compute_s, data, strict=True))
    for rank, (own_s, fetch_s) in enumerate(zip(compute_s, data, strict=True)):
        step = Step(fetch_s, 0.0, own_s, longest_s - own_s - fetch_s + comm_s, 0.001, SIZE)
        made.add(watched_row(rank, [step] * NUM_STEPS, len(compute_s)))
    return made


DIVIDED = "attach(model, optimizer, loader)"


@pytest.mark.parametrize(
    ("made", "name", "saved"),
    [
        (watched([0.05, 0.05, 0.05, 0.05]), None, {}),
        # 1/4 of the batch at 1/150 s against 3/4 at 1/50 s: all ranks take 60 ms
        (watched([0.05, 0.05, 0.15, 0.05]), "rank 2 compute_s", {DIVIDED: 1 - 65 / 155}),
        (watched([0.05] * 4, data_s=[0.0, 0.1, 0.0, 0.0]), "loader 1", {"more num_workers": 100 / 155}),
        (watched([0.05] * 4, data_s=[0.1] * 4), "all loaders", {"more num_workers": 100 / 155}),
        # int8 takes 0.3 of the time, and four local steps a quarter of that; twice the batch shares it out
        (
            watched([0.05] * 4, comm_s=0.149),
            "network",
            {
                'attach(..., exchange="lossy")': 0.7 * 149 / 200,
                'attach(..., exchange="local")': (1 - 0.3 / 4) * 149 / 200,
                'attach(..., global_batch="adaptive")': (149 + 1) / 2 / 200,
            },
        ),
    ],
    ids=["nothing", "rank", "loader", "loaders", "network"],
)
def test_what_is_slow_is_named_in_the_first_window_with_what_a_remedy_saves(
    made: Watched, name: str | None, saved: dict[str, float]
) -> None:
    assert [each.name for each in made.found] == ([] if name is None else [name])
    assert name is None or made.windows_named[name][0] == 1
    report = made.report()
    assert report is not None
    found = {each.how: each.saving for each in report["remedies"] if each.is_worthwhile}
    assert found.keys() == saved.keys()
    for how, expected in saved.items():
        assert found[how] == pytest.approx(expected, abs=0.01), how


SCRIPT = """
import os, sys
assert "torch" not in sys.modules and "numpy" not in sys.modules
os.environ["MADE_BEFORE_TORCH"] = "1"
import torch, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.02 if os.environ["RANK"] == "1" else 0.0)
        return torch.ones(4) * index

if __name__ == "__main__":
    assert sys.argv == [sys.argv[0], "--epochs", "1"] and __file__ == os.path.abspath(sys.argv[0])
    assert sys.modules["__main__"].Data is Data and sys.path[0] == os.path.dirname(__file__)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    for step, inputs in enumerate(loader):
        model(inputs).mean().backward()
        optimizer.step()
        if step == 50 and dist.get_rank() == 0:
            raise RuntimeError("failed in the script")
"""


@pytest.mark.slow
def test_a_script_that_fails_ends_as_under_torchrun_and_is_reported(tmp_path: Path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "dynamix.cli.main", "watch", "--json", str(report), "--", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), "--epochs", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: failed in the script" in done.stderr
    assert "Rank 1 has a slow loader" in done.stderr
    assert json.loads(report.read_text())["windows_named"]["loader 1"][0] <= 10
