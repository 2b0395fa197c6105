"""The share of a model's numbers that lies in embedding tables, whose gradients are zero in most rows."""

from torch import nn

from dynamix.trainer.exchange.rows import table_share


class Tied(nn.Module):
    """A table whose numbers are an output layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Embedding(10, 4)
        self.outputs = nn.Linear(4, 10, bias=False)
        self.outputs.weight = self.inputs.weight


def test_tables_count_but_not_where_their_gradient_is_dense_or_sent_sparse() -> None:
    assert table_share([nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 5, bias=False))]) == 40 / 60
    assert table_share([nn.Embedding(10, 4), nn.Linear(4, 5, bias=False)]) == 40 / 60
    assert table_share([nn.EmbeddingBag(10, 4)]) == 1.0
    assert table_share([nn.Embedding(10, 4, sparse=True), nn.Linear(4, 5)]) == 0.0
    assert table_share([Tied()]) == 0.0
    frozen = nn.Embedding(10, 4)
    frozen.weight.requires_grad_(requires_grad=False)
    assert table_share([frozen, nn.Linear(4, 5)]) == 0.0
    assert table_share([nn.Linear(4, 5)]) == 0.0
