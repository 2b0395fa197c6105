"""The code of the guide to frameworks, run as it stands there; twice, so that it also resumes."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.guides import GUIDES, run_page
from tests.support.ranks import run_ranks

MORE = """
plain_model, plain_optimizer, plain_loader = model.module, optimizer, loader
if "accelerate" in code:
    plain_loader = DataLoader(dataset, batch_size=32, shuffle=True)
if "lightning" in code:
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Linear(32, 2)

        def training_step(self, batch, batch_idx):
            return criterion(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
if "transformers" in code:

    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Linear(32, 2)

        def forward(self, features, labels):
            return {"loss": criterion(self.layers(features), labels)}

    def collate(samples):
        features, labels = zip(*samples)
        return {"features": torch.stack(features), "labels": torch.stack(labels)}

    labelled_model, labelled_dataset = Labelled(), dataset
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="make test-frameworks")
def test_each_recipe_trains_and_resumes(tmp_path: Path) -> None:
    for _ in range(2):
        (places,) = run_ranks(run_page, 1, GUIDES / "frameworks.md", str(tmp_path), MORE)
        assert len(places) == 3
    assert {"checkpoint", "last.ckpt", "run"} <= {path.name for path in tmp_path.iterdir()}
