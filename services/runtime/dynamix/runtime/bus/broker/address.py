"""Where a broker may be: on this machine, or anywhere with credentials."""

import ipaddress
from urllib.parse import urlsplit

from dynamix.runtime.settings import BusSettings, redact_url


def check_url(settings: BusSettings) -> None:
    """Refuse a broker beyond loopback without credentials.

    Raises:
        ValueError: naming the host.
    """
    for url in settings.url.split(","):
        parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
        if parts.scheme not in {"nats", "tls"}:
            raise ValueError(f"{redact_url(url)}: the bus speaks nats:// and tls:// only")
        has_credentials = bool(settings.user or parts.username)
        if not has_credentials and not _is_loopback(parts.hostname or ""):
            raise ValueError(
                f"{redact_url(url)} is not this machine: set DYNAMIX_NATS_USER and DYNAMIX_NATS_PASSWORD_FILE "
                "(beyond loopback the bus is never used without credentials)"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
