"""Weights on their way to the sites, one publication at a time: what was published meanwhile goes together,
as what has changed since the one that the site has.

waits for                    unblocked by
a newer publication          Rollouts.weights_available -> publish
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.wide_area.link import Site


@dataclass
class Deliveries:
    """`arrived(site, step)` is called when all relays of a site have the weights of a step; sites are
    numbered from 1. They begin with the weights of step 0."""

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
