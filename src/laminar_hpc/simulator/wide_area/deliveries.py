"""Weights on their way to the sites, one publication at a time: what was published meanwhile goes together,
as what has changed since the one that the site has.

waits for                    unblocked by
a newer publication          Rollouts.weights_available -> publish
"""

from collections.abc import Callable, Sequence

from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.wide_area.link import Site


class Deliveries:
    """`arrived(site, step)` is called when all relays of a site have the weights of a step; sites are
    numbered from 1. They begin with the weights of step 0."""

    def __init__(self, clock: Clock, sites: Sequence[Site], arrived: Callable[[int, int], None]) -> None:
        self.clock, self.sites, self.arrived = clock, sites, arrived
        self.newest = 0
        self.has = [0] * len(sites)
        self.busy = [False] * len(sites)
        self.seconds: list[float] = []  # of each delivery, in the order of their ends

    def publish(self, step: int) -> None:
        self.newest = step
        for site in range(len(self.sites)):
            self._send(site)

    def _send(self, site: int) -> None:
        if self.busy[site] or self.has[site] >= self.newest:
            return
        self.busy[site] = True
        seconds = self.sites[site].seconds(self.newest - self.has[site])
        self.clock.after(seconds, self._delivered, site, self.newest, seconds)

    def _delivered(self, site: int, step: int, seconds: float) -> None:
        self.busy[site], self.has[site] = False, step
        self.seconds.append(seconds)
        self.arrived(site + 1, step)
        self._send(site)
