"""A capture and a session's metrics in pandas and Arrow: types, gaps, units."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.recordings import DEMO

from dynamix import recording
from dynamix.cli.main import main

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the frameworks


def test_a_capture_is_a_dataframe() -> None:
    pd = pytest.importorskip("pandas", reason="pandas is not installed: make test-frameworks")
    frame = recording.load(DEMO).to_pandas()
    assert len(frame) == 120
    assert frame["ruling_window"].isna().sum() == 8
    kinds = {name: str(frame[name].dtype) for name in ("window", "ruling_window", "step_time_s", "decided_split")}
    assert kinds == {"window": "int64", "ruling_window": "Int64", "step_time_s": "float64", "decided_split": "object"}
    by_rank = frame[frame.window > 2].groupby("rank").local_batch_size.mean()
    assert by_rank[3] < by_rank[0]
    assert (
        pd.DataFrame([{"step": 5, "loss": 0.5}, {"step": 10}]).loss.isna().sum() == 1
    )  # as session.metrics() has them


def test_a_capture_is_an_arrow_table() -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: make test-frameworks")
    table = recording.load(DEMO).to_arrow()
    assert (table.num_rows, table["ruling_window"].null_count) == (120, 8)
    assert table.schema.field("node_run_queue_wait_ratio").type == pa.float64()
    assert table.schema.field("local_batch_size").type == pa.int64()
    assert table["job"][0].as_py() == recording.load(DEMO)["job"][0]


def test_the_notebook_of_the_documents_draws_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: make test-frameworks")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: make test-frameworks")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert main(["export", str(DEMO), "-o", "runs/rule.parquet"]) == 0
    document = (ROOT / "docs" / "export.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", document, flags=re.DOTALL | re.MULTILINE):
        if "attach(" not in block:  # that one is a line of a training script
            exec(block, names)
    assert len(names["axes"].get_lines()) == 1
    assert names["sizes"].shape == (30, 4)
    assert len(names["decisions"]) == 30
