"""Where a run's figures are to be read by Prometheus: `observability.prometheus` as an address. Pure."""

import ipaddress
import re
from collections.abc import Iterator

from laminar_hpc.config.schema import RunConfig

_ADDRESS = re.compile(r"(?:(\[[0-9A-Fa-f:.]+\]|[\w.-]+):)?([0-9]{1,5})")
_PORT_MAX = 65_535


def scrape_address(text: str) -> tuple[str, int] | None:
    """(host, port) of PORT or ADDRESS:PORT, the former on loopback; None for "0", which is off. Raises
    ValueError for anything else."""
    if text.strip() == "0":
        return None
    found = _ADDRESS.fullmatch(text.strip())
    if not found or not 0 < int(found[2]) <= _PORT_MAX:
        raise ValueError(text)
    return (found[1] or "127.0.0.1").strip("[]"), int(found[2])


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine's users can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def wrong_scraping(config: RunConfig) -> Iterator[str]:
    """One line for an address that is none, and for a key without a listener."""
    try:
        address = scrape_address(config.observability.prometheus)
    except ValueError:
        yield (
            f"@observability.prometheus: use PORT (1 to {_PORT_MAX}, on loopback), ADDRESS:PORT such as "
            "0.0.0.0:9400 or [::]:9400, or 0 for none"
        )
    else:
        if config.observability.prometheus_key and address is None:
            yield "@observability.prometheus_key is for observability.prometheus=PORT: name the port as well"
