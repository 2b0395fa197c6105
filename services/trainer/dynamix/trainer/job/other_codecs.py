"""Exchange codecs of other packages that a job has: those that its script names."""

from collections.abc import Mapping

from dynamix.runtime.extensions import extension_names
from dynamix.schemas.messages.allocation import Exchange, ExchangePermission, OtherCodec
from dynamix.schemas.subjects import is_token
from dynamix.trainer.exchange.registry import CODECS, GROUP, exchange_codec


def other_codecs(
    policy_options: Mapping[str, float | str] | None, exchange: ExchangePermission | Exchange
) -> tuple[OtherCodec, ...]:
    """The codecs that the option `codec` of the policy, or the exchange of the whole run, names and a package has.

    Raises:
        ValueError: when what is registered under a name cannot be used.
    """
    named = [policy_options.get("codec")] if isinstance(policy_options, Mapping) else []
    if isinstance(exchange, Exchange):
        named.append(exchange.codec)
    installed = set(extension_names(GROUP)) - set(CODECS) if set(named) - set(CODECS) else set()
    names = [name for name in dict.fromkeys(named) if isinstance(name, str) and name in installed]
    for name in names:
        if not is_token(name):
            raise ValueError(
                f"codec {name!r} of another package: register it under a name of 1 to 63 of the characters a-z, 0-9 "
                "and '-'"
            )
    return tuple(OtherCodec(name, exchange_codec(name).is_lossless) for name in names)
