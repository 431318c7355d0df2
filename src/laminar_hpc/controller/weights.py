"""The way of the weights as the controller sees it: ids, each lane's chain of relays, and which machine holds
what.

    trainer --NewWeightId--> id
    controller/chain.py: who links to whom, and who sends again
    relay --RelayHas--> WeightsAvailable to rollouts

Its handlers are called by the controller's loop, which owns members and outbox.
"""

import logging
import time
from typing import TYPE_CHECKING

from laminar_hpc import messages as m
from laminar_hpc.controller.chain import TRAINER, Chain, Orders
from laminar_hpc.controller.members import Member
from laminar_hpc.observability import console

if TYPE_CHECKING:
    from laminar_hpc.controller.loop import Controller

log = logging.getLogger(__name__)


class Weights:
    def __init__(self, controller: "Controller", relays: int) -> None:
        self.c = controller
        lanes = controller.config.relay.lanes
        self.chains = [Chain(max(1, relays // lanes), lane, lanes) for lane in range(lanes)]
        self._senders = [0] if lanes == 1 else []  # trainer rank of each lane, as far as known
        self._next_id = controller.store.next_ids()[0]
        self.newest = (-1, -1)  # (id, step) that some relay holds
        self.steps: dict[int, int] = {}  # by id
        self.of_machine: dict[str, tuple[int, int]] = {}
        # by machine, oldest first: what its slots hold, if the oldest has not just been given up
        self._held: dict[str, list[int]] = {}

    # ---- chains --------------------------------------------------------------------------------------------

    def chain_of(self, number: int) -> Chain:
        """By the index of a relay or an epoch."""
        return self.chains[number % len(self.chains)]

    def form(self) -> None:
        """Links relays that have come, around those that have gone or are silent, and has the newest weights
        sent to who misses them."""
        for chain in self.chains:
            before = chain.order
            relays = {
                each.hello.index: each.heard
                for each in self.c.members.all("relay")
                if self.chain_of(each.hello.index) is chain
            }
            self._send(chain, chain.update(relays, self._sender_of(chain) is not None, time.monotonic()))
            if chain.order == before:
                continue
            name = "the chain of relays" if len(self.chains) == 1 else f"lane {chain.lane}'s chain of relays"
            log.info("%s is now %s", name, chain.order)
            for index in set(before) & relays.keys() - set(chain.order):
                silent = time.monotonic() - relays[index]
                text = (
                    f"relay {index} is left out of the chain (silent for {silent:.1f} s, or out of its "
                    "neighbours' reach) until it is heard"
                )
                log.warning(text)
                if self.c.separate:
                    self.c.say(console.line("warning", f"{text}; the others go on"))

    def _sender_of(self, chain: Chain) -> Member | None:
        return self.c.members.at("trainer", self._senders[chain.lane]) if self._senders else None

    def _send(self, chain: Chain, orders: Orders) -> None:
        for who, message in orders:
            self.c.send(
                self._sender_of(chain) if who == TRAINER else self.c.members.at("relay", who), message
            )

    def on_LaneSenders(self, member: Member, senders: m.LaneSenders) -> None:
        self._senders = senders.ranks

    def on_StoreOpened(self, member: Member, opened: m.StoreOpened) -> None:
        chain = self.chain_of(opened.epoch)
        self._send(chain, chain.store_opened(opened, self._place(member)))

    @staticmethod
    def _place(member: Member) -> int:
        return TRAINER if member.hello.role == "trainer" else member.hello.index

    def on_LinkDown(self, member: Member, down: m.LinkDown) -> None:
        if self.chain_of(down.epoch).link_down(down.epoch, self._place(member), time.monotonic()) is not None:
            log.warning("%s: %s; linking again", member.name, down.text)
            # A death has a line of its own; in one torchrun it ends the run.
            if self.c.separate and not self.c.ending and not self.c.members.dead():
                self.c.say(console.line("warning", f"{member.name}: {down.text}; linking again"))

    # ---- ids, and who has them -----------------------------------------------------------------------------

    def on_NewWeightId(self, member: Member, request: m.NewWeightId) -> None:
        weight_id, self._next_id = self._next_id, self._next_id + 1
        self.c.store.add_weights(weight_id, self.c.store.get("restore_epoch", 0), request.step, time.time())
        self.steps[weight_id] = request.step
        relays = max(chain.publication(weight_id) for chain in self.chains)
        self.c.send(member, m.WeightId(weight_id, request.step, relays))

    def on_Published(self, member: Member, p: m.Published) -> None:
        self.c.metrics.write(
            "publish",
            weight_id=p.weight_id,
            step=p.step,
            stall_seconds=p.stall_seconds,
            probe_seconds=p.probe_seconds,
            seconds=p.seconds,
            bytes=p.bytes,
            changed_fraction=p.changed,
            bytes_over_full=p.bytes / p.full_bytes if p.full_bytes else None,
        )
        self.c.probes.scored(p.weight_id, p.step, "trainer", p.probe_logprobs)

    def on_RelayHas(self, member: Member, has: m.RelayHas) -> None:
        if has.bytes:  # else it is what a relay that was taken for dead still holds
            self.c.metrics.write(
                "relay",
                index=member.hello.index,
                weight_id=has.weight_id,
                step=has.weight_step,
                seconds=has.seconds,
                bytes=has.bytes,
            )
        self.chain_of(member.hello.index).relay_has(member.hello.index, has.weight_id, has.passed_on)
        if not has.complete:
            return
        if has.weight_id > self.newest[0] and self.c.config.pipeline.repack != "off":
            self.c.migration.look_soon()
        self.newest = max(self.newest, (has.weight_id, has.weight_step))
        self.of_machine[member.hello.machine] = (has.weight_id, has.weight_step)
        held = self._held.setdefault(member.hello.machine, [])
        held[:] = [*[i for i in held if i != has.weight_id][1 - self.c.config.relay.slots :], has.weight_id]
        for rollout in self.c.members.all("rollout"):
            if rollout.hello.machine == member.hello.machine:
                self.c.send(rollout, m.WeightsAvailable(has.weight_id, has.weight_step))

    def loadable(self, machine: str, loading: set[int]) -> frozenset[int]:
        """What a replica there could load while others there are `loading`: of older ids no more at a time
        than leave the relay, beside the newest one, a slot to write to."""
        held = self._held.get(machine, [])
        older = set(held[:-1])
        most = self.c.config.relay.slots - 2
        return frozenset(held[-1:]) | (older if len(older & loading) < most else older & loading)

    def gone_from(self, machine: str, weight_id: int | None = None) -> None:
        """Its slots have been rewritten, as a replica found, or all of them by a relay that has just come."""
        self._held[machine] = [i for i in self._held.get(machine, []) if weight_id not in (i, None)]
