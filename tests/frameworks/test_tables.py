"""A capture and a session's metrics in pandas and Arrow: types, gaps, units."""

import pytest
from tests.support.recordings import DEMO

from dynamix import recording

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
