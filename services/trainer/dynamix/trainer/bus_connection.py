"""How a rank reaches the bus: as the environment or the script says, by a transport of the script's own, or not."""

from typing import Literal

from dynamix.runtime.settings import BusSettings

from .rendezvous import Rendezvous
from .settings import Environment
from .wire.client import BusClient
from .wire.transport import Transport

Connect = BusSettings | Transport | Literal[False] | None
"""What `attach(connect=...)` takes."""


def bus_settings(connect: object, environment: Environment) -> BusSettings | None:
    """How the ranks reach the bus; `None` where they train without one, or over a transport of the caller's."""
    if not (connect is None or connect is False or isinstance(connect, BusSettings | Transport)):
        raise TypeError(
            f"connect={connect!r} is of type {type(connect).__name__}: leave connect out and set DYNAMIX_NATS_URL, "
            "pass dynamix.runtime.settings.BusSettings(url=...), or pass False to train without a bus"
        )
    return environment.bus if connect is None else connect if isinstance(connect, BusSettings) else None


def transport_of(
    connect: Connect, bus: BusSettings | None, met: Rendezvous, environment: Environment, *, hears_traces: bool
) -> Transport:
    """The way to the bus of a rank that speaks: the first of each node reports, rank 0 also listens."""
    place = met.place
    if place.local_rank != 0 or connect is False:
        return Transport()
    if bus is None:
        assert connect is not None, "without a connection of the caller's own the settings are the environment's"
        assert not isinstance(connect, BusSettings), "its settings are the bus"
        return connect
    client = BusClient(
        bus,
        node=place.node,
        outbox_messages=environment.trainer.outbox_messages,
        actions_of=met.identity.job if place.rank == 0 else None,
        traces_of=met.identity.job if hears_traces else None,
    )
    client.start()
    return client
