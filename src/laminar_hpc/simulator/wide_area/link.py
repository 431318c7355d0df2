"""What a wide-area link carries, and how long weights take that sites pass on to one another."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.cost import chain_seconds

_SEGMENT = 1448  # bytes of a TCP segment of an Ethernet frame of 1,500
_MATHIS = math.sqrt(1.5)


@dataclass(frozen=True)
class WanLink:
    """`bandwidth` in bytes/s, `round_trip` in seconds, `loss` the share of packets that are lost."""

    bandwidth: float
    round_trip: float = 0.0
    loss: float = 0.0

    def rate(self, c: Constants) -> float:
        """Bytes/s that arrive: no more than the bandwidth, and than `wan_streams` TCP connections carry, each
        at most sqrt(3/2) segments per round trip and square root of the loss (Mathis et al., CCR 27(3), 1997,
        equation 3)."""
        useful = self.bandwidth * (1.0 - self.loss)
        if not self.round_trip or not self.loss:
            return useful
        return min(useful, c.wan_streams * _MATHIS * _SEGMENT / (self.round_trip * math.sqrt(self.loss)))


@dataclass(frozen=True)
class Site:
    """How weights come to one place. A whole copy takes `latency` + `copy` seconds; to one that has the
    weights of n steps before, `latency` + `copy` x min(1, n x `changed`)."""

    latency: float
    copy: float
    changed: float = field(default=1.0, metadata={"time": False})

    def seconds(self, steps: int) -> float:
        """From the trainer's place to the last relay of this one, `steps` after what it has."""
        return self.latency + self.copy * min(1.0, steps * self.changed)


def chained(size: float, links: Sequence[tuple[WanLink, float]], c: Constants) -> tuple[Site, ...]:
    """Sites in the order of `links`, each with the seconds of the relays' chain inside it, for `size` bytes
    of weights. They stand in one chain, the fastest link first, and each passes on what it has received so
    far: one copy leaves the trainer, and a site is as fast as the slowest link before it. The formula is that
    of the relays' chain (Laminar, relay tier)."""
    order = sorted(range(len(links)), key=lambda i: (-links[i][0].rate(c), i))
    sites: dict[int, Site] = {}
    latency, slowest = 0.0, math.inf
    for place, i in enumerate(order):
        link, inside = links[i]
        latency += link.round_trip / 2
        slowest = min(slowest, link.rate(c))
        chain = dataclasses.replace(c, chain_bytes_per_second=slowest)
        sites[i] = Site(latency + inside, chain_seconds(size, place + 2, chain), c.changed_bytes_share)
    return tuple(sites[i] for i in range(len(links)))


@dataclass
class Deliveries:
    """Sends each site one publication at a time. What was published meanwhile goes together, as what has
    changed since the weights that the site has. `arrived(site, step)` is called when all relays of a site
    have the weights of a step. Sites are numbered from 1 and begin with the weights of step 0."""

    clock: Clock
    sites: Sequence[Site]
    arrived: Callable[[int, int], None]
    newest: int = 0
    has: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # steps, by place in `sites`
    busy: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)  # of each delivery, in the order of their ends

    def publish(self, step: int) -> None:
        self.newest = step
        for site in range(len(self.sites)):
            self._send(site)

    def _send(self, site: int) -> None:
        if site not in self.busy and self.has[site] < self.newest:
            self.busy.add(site)
            seconds = self.sites[site].seconds(self.newest - self.has[site])
            self.clock.after(seconds, self._delivered, site, self.newest, seconds)

    def _delivered(self, site: int, step: int, seconds: float) -> None:
        self.busy.discard(site)
        self.has[site] = step
        self.seconds.append(seconds)
        self.arrived(site + 1, step)
        self._send(site)
