"""The exchange of a job that was started with gradient servers: the same in the whole run."""

from dynamix.schemas.messages.allocation import LOSSY_CODECS, SERVERS, Exchange, ExchangePermission
from dynamix.trainer.communication.gradient_servers import split_address

SERVED_CODECS = ("none", "rows", "sketch")
"""Codecs whose sums owners without a gradient of their own can make."""
VARIABLE = "DYNAMIX_TRAINER_GRADIENT_SERVERS"


def server_addresses(text: str) -> tuple[str, ...]:
    """The servers that the environment names.

    Raises:
        ValueError: for what is no list of addresses, or names one twice.
    """
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        split_address(address)
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{VARIABLE}={text}: each server once")
    return addresses


def served_exchange(
    exchange: ExchangePermission | Exchange, named: str
) -> tuple[ExchangePermission | Exchange, tuple[str, ...]]:
    """What a script asks for, over the servers that it was started with, and their addresses.

    Raises:
        ValueError: when it asks for something that servers cannot do, or for servers without any.
    """
    servers = server_addresses(named)
    return _checked(exchange, servers), servers


def _checked(exchange: ExchangePermission | Exchange, servers: tuple[str, ...]) -> ExchangePermission | Exchange:
    asks = isinstance(exchange, Exchange) and exchange.route == SERVERS
    if not servers:
        if asks:
            raise ValueError(
                f"the route {SERVERS!r} needs gradient servers: start `dynamix serve-gradients` and name the "
                f"addresses in {VARIABLE}=HOST:PORT,..."
            )
        return exchange
    if exchange == "exact":
        return Exchange(route=SERVERS)
    if not isinstance(exchange, Exchange) or not asks:
        shown = exchange.label if isinstance(exchange, Exchange) else repr(exchange)
        raise ValueError(
            f"exchange={shown} and gradient servers exclude each other, since no decision uses them: pass "
            f"Exchange(route={SERVERS!r}, ...), leave exchange out, or start the job without {VARIABLE}"
        )
    if exchange.codec not in SERVED_CODECS:
        reason = "servers keep no residuals" if exchange.codec in LOSSY_CODECS else "servers cannot sum what it sends"
        raise ValueError(
            f"exchange={exchange.label}: {reason}; use one of the codecs {', '.join(SERVED_CODECS)}, or the route "
            "'shares'"
        )
    return exchange
