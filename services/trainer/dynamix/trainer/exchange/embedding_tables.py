"""Embedding tables: parameters whose gradients are zero in all rows that a batch does not name, by their module."""

from collections.abc import Iterable

from torch import nn

TABLES = (nn.Embedding, nn.EmbeddingBag)


def table_share(models: Iterable[nn.Module]) -> float:
    """Share of all numbers that are trained which lie in embedding tables, 0 ... 1.

    A table that another module has too, as where input and output are tied, has a dense gradient; of one with
    `sparse=True` PyTorch sends only the touched rows by itself. Neither counts.
    """
    modules = [module for model in models for module in model.modules()]
    dense = {
        id(each) for module in modules if not isinstance(module, TABLES) for each in module.parameters(recurse=False)
    }
    in_tables = {
        id(module.weight): module.weight.numel()
        for module in modules
        if isinstance(module, TABLES) and module.weight.requires_grad and not module.sparse
    }
    trained = {
        id(each): each.numel() for module in modules for each in module.parameters(recurse=False) if each.requires_grad
    }
    return sum(size for key, size in in_tables.items() if key not in dense) / max(sum(trained.values()), 1)
