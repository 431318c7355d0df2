"""The way of the weights as the controller sees it: ids, each lane's chain of relays, and which machine holds
what.

    trainer --NewWeightId--> id
    controller/weights/relay_chain.py: who links to whom, and who sends again
    controller/weights/places.py: which relay of another place pulls from which one here
    relay --RelayHas--> WeightsAvailable to the rollouts of its machine
"""

import logging
import time
from typing import NamedTuple

from laminar_hpc.config.adapter_places import slots_of
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.shared import NUMBERS, Shared
from laminar_hpc.controller.weights.places import Places
from laminar_hpc.controller.weights.probes import Probes
from laminar_hpc.controller.weights.relay_chain import TRAINER, Chain, Orders, Place
from laminar_hpc.line.messages.chain import LinkDown, RelayHas, StoreOpened
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.line.messages.publication import LaneSenders, NewWeightId, Published, WeightId
from laminar_hpc.line.messages.rollouts import WeightsAvailable
from laminar_hpc.machine.observability import console
from laminar_hpc.store.store import Store

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.1  # between two looks at the chains while nothing happens to them


class HeldVersion(NamedTuple):
    """Weights that a relay holds."""

    weight_id: int
    step: int


class Weights:
    """`relays`: how many the run starts with."""

    def __init__(self, shared: Shared, relays: int, store: Store, probes: Probes) -> None:
        self._shared = shared
        self._members = shared.members
        self._outbox = shared.outbox
        self._store = store
        self._probes = probes
        lanes, wanted = shared.config.relay.lanes, max(1, relays // shared.config.relay.lanes)
        self._epoch = store.get("restore_epoch", 0)
        self._next_id = store.next_ids()[0]
        first, issued = self._epoch * NUMBERS, self.newest_issued
        self.chains = [Chain(wanted, lane, lanes, first_epoch=first, issued=issued) for lane in range(lanes)]
        self.places = Places(self._members, self._outbox, self._warn, first)
        self._senders = [0] if lanes == 1 else []  # trainer rank of each lane, as far as known
        self._answered: tuple[str, WeightId] | None = None  # the newest request for an id, and its answer
        self.newest: HeldVersion | None = None  # that some relay holds
        self.steps = self._steps_so_far()  # by id
        self._newest_on: dict[str, HeldVersion] = {}  # by machine
        self._slots = slots_of(shared.config)
        self._looked: float | None = None  # at the chains; None: something has happened to them since
        self._news: set[str] = set()  # machines that were told of weights since `take_news`
        # by machine, oldest first: what its slots hold, if the oldest has not just been given up
        self._held: dict[str, list[int]] = {}

    def _steps_so_far(self) -> dict[int, int]:
        """By id, of earlier controllers. Where trainers have started again since, as in `restored`."""
        steps = self._store.weight_steps()
        for first_id, step in self._store.starts_of_trainers():
            steps.update({i: step for i, later in steps.items() if i < first_id and later > step})
        return steps

    @property
    def newest_issued(self) -> int | None:
        """The newest id, whether any relay holds it or not."""
        return self._next_id - 1 if self._next_id else None

    # ---- chains --------------------------------------------------------------------------------------------

    def _touch(self, hello: Hello, number: int) -> Chain:
        """Of a member that has to do with it, and the index of a relay or an epoch: the chain to which
        something happens now."""
        self._looked = None
        return self.places.chain(hello.place) if hello.place else self.chains[number % len(self.chains)]

    def relay_joined(self, identity: str, hello: Hello) -> None:
        """It begins with empty slots."""
        self._touch(hello, hello.index).joined(hello.index, time.monotonic())
        self.places.relay_joined(identity, hello.place)
        self._held[hello.machine] = []

    def relay_lost(self, hello: Hello) -> None:
        """Joins the neighbours of a lost relay."""
        self._touch(hello, hello.index).left(hello.index)

    def update_chains(self) -> None:
        """Links relays that have come, around those that have left or are silent, and has the newest weights
        sent to who misses them: when something has happened to a chain, else every _LOOK_SECONDS."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        seen: list[dict[int, float]] = [{} for _ in self.chains]
        for relay in self._members.all("relay"):
            if relay.hello.place:
                continue
            seen[relay.hello.index % len(self.chains)][relay.hello.index] = relay.last_seen
        for chain, relays in zip(self.chains, seen, strict=True):
            before = chain.order
            self._send(chain, chain.update(relays, self._sender_of(chain) is not None, now))
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
                self._warn(f"{text}; the others go on")
        self.places.update(self.chains[0].order, now)

    def _warn(self, text: str) -> None:
        """Tells the user what a run with roles apart survives."""
        if self._shared.roles_apart and not self._shared.state.ending:
            self._shared.say(console.line("warning", text))

    def _sender_of(self, chain: Chain) -> Member | None:
        return self._members.at("trainer", self._senders[chain.lane]) if self._senders else None

    def _send(self, chain: Chain, orders: Orders) -> None:
        for place, message in orders:
            member = self._sender_of(chain) if place is None else self._members.at("relay", place)
            self._outbox.send(member, message)

    def on_lane_senders(self, _: Member, senders: LaneSenders) -> None:
        self._senders = senders.ranks
        self._looked = None

    def trainers_ended(self) -> None:
        """The relays are cut off from their senders; the next trainer generation says who sends what."""
        self._looked = None
        for chain in self.chains:
            self._send(chain, chain.sender_left())
        self._senders = [0] if len(self.chains) == 1 else []

    def on_store_opened(self, member: Member, opened: StoreOpened) -> None:
        chain = self._touch(member.hello, opened.epoch)
        self._send(chain, chain.store_opened(opened, _place(member)))

    def on_link_down(self, member: Member, down: LinkDown) -> None:
        if self.places.link_down(member, down):
            return
        chain = self._touch(member.hello, down.epoch)
        link = chain.link_down(down.epoch, _place(member), time.monotonic())
        if link is not None:
            text = f"{member.name}: {down.text}; linking again"
            log.warning(text)
            is_done = link.upstream is TRAINER and self._shared.state.trainer_done
            if not is_done and not self._members.dead(
                look=True
            ):  # a death has a line of its own; in one world it ends the run
                self._warn(text)

    # ---- ids, and who has them -----------------------------------------------------------------------------

    def on_new_weight_id(self, member: Member, request: NewWeightId) -> None:
        before = self._answered
        if before and before[0] == member.identity and before[1].request == request.request > 0:
            self._outbox.send(member, before[1])  # it was asked again
            return
        weight_id = self._next_id
        self._next_id = self._next_id + 1
        self._store.add_weights(weight_id, self._epoch, request.step, time.time())
        self.steps[weight_id] = request.step
        relays = max(chain.publication(weight_id) for chain in self.chains)
        self._looked = None
        self._answered = member.identity, WeightId(weight_id, request.step, relays, request.request)
        self._outbox.send(member, self._answered[1])

    def restored(self, step: int) -> int:
        """The trainers start again on the weights of step `step`. Nothing follows on weights of
        later steps now: what is granted on them from here on counts as of step `step`, the last one that both
        histories share. Returns the first id that is published from here on."""
        self.steps.update({i: step for i, later in self.steps.items() if later > step})
        self._store.note_start_of_trainers(self._next_id, step)
        self._looked = None
        return self._next_id

    def on_published(self, _: Member, p: Published) -> None:
        self._shared.metrics.write(
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
        self._probes.scored(p.weight_id, p.step, "trainer", p.probe_logprobs)

    def on_relay_has(self, member: Member, has: RelayHas) -> None:
        """Tells the rollouts of the relay's machine which weights they can load."""
        index, machine = member.hello.index, member.hello.machine
        version = HeldVersion(has.weight_id, has.weight_step)
        if has.bytes:  # else it is what a relay that was taken for dead still holds
            fields = {"index": index, **version._asdict(), "seconds": has.seconds, "bytes": has.bytes}
            fields |= {} if has.wire_bytes is None else {"wire_bytes": has.wire_bytes}
            self._shared.metrics.write("relay", **fields)
        self._touch(member.hello, index).relay_has(index, version.weight_id, has.passed_on)
        if not has.complete:
            return
        if self.newest is None or version > self.newest:
            self.newest = version
        self._newest_on[machine] = version
        slots = self._slots
        held = [i for i in self._held.get(machine, []) if i != version.weight_id]
        self._held[machine] = [*held[1 - slots :], version.weight_id]
        self._news.add(machine)
        for rollout in self._members.on(machine, "rollout"):
            self._outbox.send(rollout, WeightsAvailable(*version))

    def take_news(self) -> set[str]:
        """The machines whose rollouts were told of weights since the last call."""
        news = self._news
        self._news = set()
        return news

    def newest_on(self, machine: str) -> HeldVersion | None:
        """What the rollouts of a machine were told of last."""
        return self._newest_on.get(machine)

    def is_newest_on(self, machine: str, weight_id: int) -> bool:
        """Whether a replica there that serves `weight_id` has nothing newer to load."""
        newest = self.newest_on(machine)
        return newest is None or weight_id >= newest.weight_id

    def loadable(self, machine: str, loading: set[int]) -> frozenset[int]:
        """What a replica there could load while others there are `loading`. Of older ids only so many at a
        time that the relay keeps, beside the newest one, a slot to write to."""
        held = self._held.get(machine, [])
        older = set(held[:-1])
        older_max = self._slots - 2
        return frozenset(held[-1:]) | (older if len(older & loading) < older_max else older & loading)

    def forget_slot(self, machine: str, weight_id: int) -> None:
        """A replica did not find these weights: their slot has been rewritten."""
        self._held[machine] = [i for i in self._held.get(machine, []) if i != weight_id]


def _place(member: Member) -> Place:
    return TRAINER if member.hello.role == "trainer" else member.hello.index
