"""The chain of relays in the controller: what is whole stays, neighbours of a break are joined, and the
newest weights reach everybody. Promises: the master's death elects the next; a late comer needs no trainer; a
relay that stands still is left out until it is heard."""

import pytest

from laminar_hpc.controller.weights.relay_chain import (
    QUIET_SECONDS,
    SETTLE_SECONDS,
    SILENT_SECONDS,
    TRAINER,
    Chain,
)
from laminar_hpc.line.messages.chain import CutLink, EpochProposed, JoinEpoch, SendAgain, StoreOpened


class Clock:
    """A chain, the relays that are heard, and what it orders."""

    def __init__(self, relays: int) -> None:
        self.now, self.chain, self.alive = 100.0, Chain(relays), set()
        self.heard: dict[int, float] = {}
        self.trainer = True
        for index in range(relays):
            self.come(index)
        self.first = self.turn(QUIET_SECONDS)

    def come(self, index: int) -> None:
        self.chain.joined(index, self.now)
        self.alive.add(index)
        self.heard[index] = self.now

    def leave(self, index: int) -> None:
        self.chain.left(index)
        self.alive.discard(index)
        self.heard.pop(index)

    def turn(self, seconds: float) -> list:
        self.now += seconds
        for index in self.alive:
            self.heard[index] = self.now
        return self.chain.update(self.heard, self.trainer, self.now)

    def all_have(self, weight_id: int) -> None:
        self.chain.publication(weight_id)
        for place, index in enumerate(self.chain.order):
            behind = self.chain.order[place + 1] if place + 1 < len(self.chain.order) else None
            self.chain.relay_has(
                index, weight_id, self.chain.links[behind].epoch if behind is not None else 0
            )

    def epochs(self) -> dict[int, int]:
        return {index: link.epoch for index, link in self.chain.links.items()}


@pytest.fixture
def clock():
    return Clock(4)


def proposals(orders) -> list[tuple[int, int]]:
    return [(who, message.relays[0]) for who, message in orders if isinstance(message, EpochProposed)]


def test_the_first_chain_waits_for_all_relays_and_the_trainer():
    """A run starts with one chain, not with one that grows relay by relay."""
    chain = Chain(2)
    chain.joined(1, 0.0)
    assert chain.update({1: 0.9}, True, 1.0) == []
    chain.joined(0, 1.0)
    assert (
        chain.update({0: 1.9, 1: 1.9}, False, 2.0) == [] and chain.update({0: 1.9, 1: 1.9}, True, 1.2) == []
    )
    assert proposals(chain.update({0: 1.9, 1: 1.9}, True, 2.0)) == [(TRAINER, 0), (0, 1)]


def test_an_epoch_tells_its_lane():
    """So trainer and relays need not be told which lane a link is of; each lane's chain is on its own."""
    for lane in range(3):
        chain = Chain(2, lane, 3)
        for machine in range(2):
            chain.joined(3 * machine + lane, 0.0)
        heard = {3 * machine + lane: 1.0 for machine in range(2)}
        orders = chain.update(heard, True, 1.0)
        assert proposals(orders) == [(TRAINER, lane), (lane, 3 + lane)]
        assert all(message.epoch % 3 == lane and message.epoch > 0 for _, message in orders)


def test_a_death_in_the_middle_joins_the_neighbours_and_leaves_the_rest(clock):
    """Only the link over the gap is made anew."""
    assert proposals(clock.first) == [(TRAINER, 0), (0, 1), (1, 2), (2, 3)]
    clock.all_have(7)
    before = clock.epochs()
    clock.alive.discard(2)
    clock.heard.pop(2)
    clock.chain.left(2)
    assert proposals(clock.turn(0.1)) == [(1, 3)]
    after = clock.epochs()
    assert (
        clock.chain.order == [0, 1, 3]
        and (after[0], after[1]) == (before[0], before[1])
        and after[3] > before[3]
    )


def test_the_masters_death_in_a_publication_elects_the_next_and_has_it_sent_again(clock):
    """The trainer links to the next relay and sends what was cut off."""
    clock.all_have(7)
    assert clock.chain.publication(8) == 4
    clock.heard.pop(0)
    clock.chain.left(0)
    clock.alive.discard(0)
    orders = clock.turn(0.1)
    assert clock.chain.order == [1, 2, 3] and proposals(orders) == [(TRAINER, 1)]
    assert next(message for who, message in orders if who == TRAINER).resend, "nobody has what was sent last"
    assert not any(isinstance(message, SendAgain) for _, message in orders)


def test_a_new_master_is_not_sent_what_it_has(clock):
    """A whole publication is not sent twice over a new link."""
    clock.all_have(7)
    clock.chain.left(0)
    clock.heard.pop(0)
    clock.alive.discard(0)
    assert not next(message for who, message in clock.turn(0.1) if who == TRAINER).resend


def test_who_stands_behind_the_break_gets_them_from_a_relay(clock):
    """Relay 2 dies in the publication of 8: 0 and 1 complete it, and 1 sends it to 3."""
    clock.all_have(7)
    clock.chain.publication(8)
    clock.alive.discard(2)
    epochs = clock.epochs()
    assert clock.chain.link_down(epochs[2], 1, clock.now) is not None
    assert clock.chain.link_down(epochs[3], 3, clock.now) is not None
    assert proposals(clock.turn(SETTLE_SECONDS)) == [(1, 3)], (
        "both neighbours miss relay 2, which is not heard"
    )
    clock.chain.relay_has(0, 8, epochs[1])
    assert clock.turn(0.1) == []
    clock.chain.relay_has(1, 8, 0)
    assert clock.turn(0.1) == [(1, SendAgain(clock.epochs()[3], 1))]
    assert clock.turn(0.1) == [], "once is enough"


def test_a_late_comer_is_served_by_the_last_relay(clock):
    """It stands at the end of the chain and costs the trainer nothing."""
    clock.all_have(7)
    clock.come(9)
    assert clock.turn(0.1) == []
    orders = clock.turn(QUIET_SECONDS)
    assert proposals(orders) == [(3, 9)] and orders[-1] == (3, SendAgain(clock.epochs()[9], 1))


def test_relays_die_and_come_while_no_trainer_is_there(clock):
    """Between two trainer generations the chain is mended and a late comer gets the newest weights from a
    relay; the next trainer generation finds the chain whole and links to its head alone."""
    clock.all_have(7)
    epoch = clock.epochs()[0]
    assert clock.chain.sender_left() == [(0, CutLink(epoch))]
    clock.trainer = False
    assert clock.turn(0.1) == []
    clock.leave(1)
    assert proposals(clock.turn(0.1)) == [(0, 2)]
    clock.leave(0)
    assert clock.turn(0.1) == []
    clock.come(9)
    orders = clock.turn(QUIET_SECONDS)
    assert proposals(orders) == [(3, 9)] and orders[-1] == (3, SendAgain(clock.epochs()[9], 1))
    clock.trainer = True
    assert proposals(clock.turn(0.1)) == [(TRAINER, 2)] and clock.chain.order == [2, 3, 9]
    assert clock.chain.publication(8) == 3


def test_a_relay_that_comes_to_the_head_while_no_trainer_is_there_is_cut_off(clock):
    """Else the one that was before it would go on sending to it, in a circle."""
    clock.all_have(7)
    clock.chain.relay_has(1, 8, 0)
    clock.chain.sender_left()
    clock.trainer = False
    before = clock.epochs()[1]
    clock.come(9)
    orders = clock.turn(QUIET_SECONDS)
    assert clock.chain.order == [1, 0, 2, 3, 9] and orders[0] == (1, CutLink(before))
    assert proposals(orders) == [(1, 0), (0, 2), (3, 9)]
    assert orders[-1] == (1, SendAgain(clock.epochs()[0], 4))


def test_a_controller_that_comes_while_no_trainer_is_there_links_relays_that_hold_weights():
    """A fresh run's relays have nothing to pass on, and wait for the trainer."""
    chain = Chain(1, first_epoch=1_000_000)
    for index in (0, 1):
        chain.joined(index, 0.0)
    heard = {0: 1.0, 1: 1.0}
    assert chain.update(heard, False, 1.0) == []
    chain.relay_has(1, 7, None)
    orders = chain.update(heard, False, 1.0)
    assert proposals(orders) == [(1, 0)] and orders[-1] == (1, SendAgain(orders[0][1].epoch, 1))


def test_a_standstill_is_left_out_and_comes_back_to_the_end(clock):
    """A silent relay holds nobody up, and its next message brings it back."""
    clock.all_have(7)
    clock.alive.discard(1)
    assert clock.turn(SILENT_SECONDS - 0.1) == []
    assert proposals(clock.turn(0.2)) == [(0, 2)]
    clock.alive.add(1)
    assert proposals(clock.turn(1)) == [(3, 1)] and clock.chain.order == [0, 2, 3, 1]


def test_reports_of_links_that_are_no_more_are_void(clock):
    """A late report about an earlier epoch changes nothing."""
    old = clock.epochs()[2]
    assert (
        clock.chain.link_down(old, 1, clock.now) is not None
        and clock.chain.link_down(old, 2, clock.now) is None
    )
    assert clock.chain.link_down(clock.epochs()[3], 0, clock.now) is None, "it is not relay 0's link"
    clock.turn(SETTLE_SECONDS)
    assert clock.chain.store_opened(StoreOpened(old, "h", 1), 1) == []
    assert clock.chain.store_opened(StoreOpened(clock.epochs()[2], "h", 1), 1) == [
        (2, JoinEpoch(clock.epochs()[2], "h", 1, "relay 1"))
    ]


def test_a_relay_that_is_alive_but_out_of_reach_is_left_out_for_a_while(clock):
    """Its neighbours try a few times; the others get on with it."""
    clock.all_have(7)
    for _ in range(3):
        clock.chain.link_down(clock.epochs()[2], 1, clock.now)
        clock.turn(SETTLE_SECONDS + 0.01)
    assert clock.chain.order == [0, 1, 3]
    clock.turn(11)
    assert clock.chain.order == [0, 1, 3, 2]
