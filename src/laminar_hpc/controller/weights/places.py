"""Relays at other places: one of each place pulls from a gate at the trainer's place, and passes on to the
others.

    OpenGate -> a relay here -> GateOpened: its address and keys
    JoinGate -> the first relay of the place's chain, which pulls
    controller/weights/relay_chain.py: from that one on to the others, as if there were no trainer

A place pulls when it can, so its link delays neither trainers nor the relays here.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from laminar_hpc.controller.fleet.members import Member, Members
from laminar_hpc.controller.shared import Outbox
from laminar_hpc.controller.weights.relay_chain import Chain
from laminar_hpc.line.messages.chain import CutLink, LinkDown
from laminar_hpc.line.messages.places import GateAddress, GateOpened, JoinGate, OpenGate

log = logging.getLogger(__name__)
_AGAIN_SECONDS = 1.0  # from the end of a link to a gate to the next one
_SAY_SECONDS = 20.0  # in which the relays of a run that begins may join in any order
Warn = Callable[[str], None]


@dataclass
class _Pull:
    """Of the relay of a place that pulls: who it is, from whom, and since which epoch of the place's
    chain."""

    relay: str  # its identity
    address: GateAddress
    epoch: int


class Places:
    """`warn` tells the user. Epochs of a place's chain begin behind `first_epoch`."""

    def __init__(self, members: Members, outbox: Outbox, warn: Warn, first_epoch: int) -> None:
        self._members = members
        self._outbox = outbox
        self._warn = warn
        self._first_epoch = first_epoch
        self._chains: dict[str, Chain] = {}
        self._pulls: dict[str, _Pull] = {}
        self._not_before: dict[str, float] = {}  # (monotonic) the next pull of a place whose link broke
        self._gate: str | None = None  # identity of the relay that was asked to open it
        self._address: GateAddress | None = None
        self._say_at = time.monotonic() + _SAY_SECONDS  # that there is no relay to open a gate

    def chain(self, place: str) -> Chain:
        """Returns the chain of its relays."""
        if place not in self._chains:
            self._chains[place] = Chain(1, first_epoch=self._first_epoch)
        return self._chains[place]

    # ---- what happens --------------------------------------------------------------------------------------

    def relay_joined(self, identity: str, place: str) -> None:
        """Whatever it was told before is void; a gate that it has opened may still be there."""
        if identity == self._gate:
            self._outbox.send_to(identity, OpenGate())
        if (pull := self._pulls.get(place)) and pull.relay == identity:
            del self._pulls[place]

    def on_gate_opened(self, member: Member, opened: GateOpened) -> None:
        if member.identity == self._gate:
            self._address = opened.address

    def link_down(self, member: Member, down: LinkDown) -> bool:
        """Whether it was a link to a gate."""
        pull = self._pulls.get(member.hello.place)
        if pull is None or (pull.relay, pull.epoch) != (member.identity, down.epoch):
            return False
        del self._pulls[member.hello.place]
        self._not_before[member.hello.place] = time.monotonic() + _AGAIN_SECONDS
        text = f"{member.name} of place {member.hello.place}: {down.text}; linking again"
        log.warning(text)
        self._warn(text)
        return True

    # ---- what to do about it -------------------------------------------------------------------------------

    def update(self, here: list[int], now: float) -> None:
        """Has a gate opened by the first of the relays `here`, in chain order, and one relay of each place
        pull from it."""
        seen: dict[str, dict[int, float]] = {}
        for relay in self._members.all("relay"):
            if relay.hello.place:
                seen.setdefault(relay.hello.place, {})[relay.hello.index] = relay.last_seen
        if not seen:
            return
        gate = self._open(here, now)
        for place, last_seen in seen.items():
            chain = self.chain(place)
            for index, message in chain.update(last_seen, False, now):
                if index is not None:  # it has no trainer
                    self._outbox.send(self._members.at("relay", index), message)
            if gate is not None and self._address is not None and now >= self._not_before.get(place, 0.0):
                pulls = self._members.of(pull.relay) if (pull := self._pulls.get(place)) else None
                # until one has weights: who pulls goes on, as another one would begin anew
                early = pulls.hello.index if pulls else min(last_seen)
                first = chain.order[0] if chain.order else early
                self._pull(place, self._members.at("relay", first), gate, self._address)

    def _open(self, here: list[int], now: float) -> Member | None:
        """The relay with the gate; asks another one where it has left."""
        gate = self._members.of(self._gate) if self._gate else None
        if gate is None and here and (gate := self._members.at("relay", here[0])):
            self._gate = gate.identity
            self._address = None
            self._outbox.send(gate, OpenGate())
        if gate is not None:
            self._say_at = now + _SAY_SECONDS
        elif now > self._say_at:
            self._say_at = math.inf
            self._warn(
                "relays of other places have no relay to pull weights from: start one where the trainer is "
                "(launch/relay.sh, without cluster.place)"
            )
        return gate

    def _pull(self, place: str, relay: Member | None, gate: Member, address: GateAddress) -> None:
        before = self._pulls.get(place)
        if relay is None or (before and (before.relay, before.address) == (relay.identity, address)):
            return
        if before and before.relay != relay.identity:
            self._outbox.send(self._members.of(before.relay), CutLink(before.epoch))
        chain = self.chain(place)
        chain.epoch += chain.lanes
        self._pulls[place] = _Pull(relay.identity, address, chain.epoch)
        log.info("%s pulls for place %s from %s", relay.name, place, gate.name)
        self._outbox.send(relay, JoinGate(chain.epoch, gate.name, address))
