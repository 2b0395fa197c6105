"""A curriculum over the number of workers: the same cluster with fewer or more of them."""

import msgspec

from dynamix.lab.simulator.scenario import Scenario


def resized(scenario: Scenario, num_workers: int, ranks_per_node: int | None = None) -> Scenario:
    """The scenario with so many workers, drawn evenly from its own in their order; its name says how many.

    With fewer workers than it has some kinds may be missing, with more each comes again in proportion.

    Raises:
        ValueError: when it names a worker that is not there then.
    """
    present = scenario.per_worker
    chosen = [present[(2 * index + 1) * len(present) // (2 * num_workers)] for index in range(num_workers)]
    return msgspec.structs.replace(
        scenario,
        name=f"{scenario.name}-of-{num_workers}",
        workers=tuple(msgspec.structs.replace(workers, count=1) for workers in chosen),
        ranks_per_node=scenario.ranks_per_node if ranks_per_node is None else ranks_per_node,
    )
