"""Which relay of another place pulls from which gate, as the controller decides it."""

import time

import pytest

from laminar_hpc.controller.fleet.members import Members
from laminar_hpc.controller.shared import Outbox
from laminar_hpc.controller.weights.places import Places
from laminar_hpc.line.messages.chain import CutLink, EpochProposed, LinkDown, SendAgain, StoreOpened
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.line.messages.places import GateAddress, GateOpened, JoinGate, OpenGate

ADDRESS = GateAddress("192.0.2.1", 7443, "server", "client", "secret")


class Script:
    """Relays 0 and 1 are where the trainer is; others join a place."""

    def __init__(self):
        self.members, self.outbox, self.warned = Members("controller", 30.0, 10.0), Outbox(), []
        self.places = Places(self.members, self.outbox, self.warned.append, 0)
        self.now = time.monotonic()
        for index in (0, 1):
            self.join(index)

    def join(self, index, place="", life="a"):
        hello = Hello("relay", index, life, 1000 + index, f"machine{index}", place=place)
        identity = hello.identity
        self.members.join(identity, hello)
        if place:
            self.places.chain(place).joined(index, self.now)
        self.places.relay_joined(identity, place)

    def leave(self, index):
        member = self.members.at("relay", index)
        self.members.leave(member)
        if member.hello.place:
            self.places.chain(member.hello.place).left(index)

    def at(self, index):
        return self.members.at("relay", index)

    def turn(self, here=(0, 1), seconds=5.0):
        """[(index of the relay, message)] that are due `seconds` later."""
        self.now += seconds
        for member in self.members.all("relay"):
            member.last_seen = self.now
        self.places.update(list(here), self.now)
        return [(int(identity.split(":")[1]), message) for identity, message in self.outbox.take()]

    def open(self, index=0, address=ADDRESS):
        self.places.on_gate_opened(self.at(index), GateOpened(address))


@pytest.fixture
def script():
    return Script()


def pulls(orders):
    return {index: message.address for index, message in orders if isinstance(message, JoinGate)}


def test_without_another_place_no_gate_is_opened(script):
    """Nothing listens for places that are not there."""
    assert script.turn() == []


def test_a_place_without_a_relay_to_pull_from_is_said_once(script):
    """All rollouts may be elsewhere; the trainer's machine needs a relay all the same."""
    script.leave(0)
    script.leave(1)
    script.join(5, "oslo")
    assert script.turn(here=[]) == []
    assert script.warned == [], "relays may join in any order"
    assert script.turn(here=[], seconds=30) == script.turn(here=[], seconds=30) == []
    assert len(script.warned) == 1
    assert "start one where the trainer is (launch/relay.sh" in script.warned[0]


def test_one_relay_of_each_place_pulls(script):
    """From the first relay at the trainer's place, when its gate is open, and told once."""
    script.join(5, "oslo")
    assert script.turn() == [(0, OpenGate())]
    for index, place in ((6, "paris"), (7, "paris")):
        script.join(index, place)
    assert script.turn() == []
    script.open()
    assert pulls(script.turn()) == {5: ADDRESS, 6: ADDRESS}
    assert script.turn() == []


def test_who_pulls_goes_on_when_another_relay_of_the_place_joins(script):
    """Each would pull a copy of its own, one after the other."""
    script.join(7, "paris")
    script.turn()
    script.open()
    assert pulls(script.turn()) == {7: ADDRESS}
    script.join(6, "paris")
    assert script.turn() == []
    script.places.chain("paris").relay_has(7, 3, None)
    script.turn()
    assert script.places.chain("paris").order == [7, 6]
    script.leave(7)
    assert pulls(script.turn()) == {6: ADDRESS}


def test_weights_go_on_inside_a_place_from_whom_has_them(script):
    """The relays of a place are linked with one another, not with those of others, and not with the
    trainer."""
    for index in (6, 7):
        script.join(index, "paris")
    script.turn()
    script.open()
    script.turn()
    chain = script.places.chain("paris")
    chain.relay_has(6, 3, None)
    orders = script.turn()
    epoch = orders[0][1].epoch
    assert orders == [(6, EpochProposed(epoch, [7], False)), (6, SendAgain(epoch, 1))]
    assert chain.order == [6, 7]
    assert [order[0] for order in chain.store_opened(StoreOpened(epoch, "10.0.0.6", 1), 6)] == [7]


def test_when_the_one_that_pulls_dies_the_next_one_does(script):
    """And who pulls no more, but lives, is cut off."""
    for index in (6, 7):
        script.join(index, "paris")
    script.turn()
    script.open()
    assert pulls(script.turn()) == {6: ADDRESS}
    script.leave(6)
    assert pulls(script.turn()) == {7: ADDRESS}
    script.places.chain("paris").relay_has(7, 3, None)
    script.turn()
    script.join(6, "paris", "b")
    assert pulls(script.turn()) == {}


def test_who_is_replaced_as_the_puller_is_cut_off(script):
    """Another relay of the place turns out to hold the newest weights, as after a controller's restart."""
    for index in (6, 7):
        script.join(index, "paris")
    script.turn()
    script.open()
    (joined,) = [message for _, message in script.turn() if isinstance(message, JoinGate)]
    script.places.chain("paris").relay_has(7, 3, None)
    orders = script.turn()
    assert (6, CutLink(joined.epoch)) in orders
    assert pulls(orders) == {7: ADDRESS}


def test_when_the_gate_dies_another_relay_opens_one(script):
    """Places go over to it; what an earlier one says late is not heard."""
    script.join(5, "oslo")
    script.turn()
    script.open()
    script.turn()
    gone = script.at(0)
    script.leave(0)
    assert script.turn(here=[1]) == [(1, OpenGate())]
    script.places.on_gate_opened(gone, GateOpened(ADDRESS))
    assert script.turn(here=[1]) == []
    other = GateAddress("192.0.2.2", 7443, "server", "client", "secret")
    script.open(1, other)
    assert pulls(script.turn(here=[1])) == {5: other}


def test_a_relay_that_joins_anew_is_told_anew(script):
    """The controller had taken it for dead: it may pull from nobody by now, or have a gate that is asked for
    again and answers the same."""
    script.join(5, "oslo")
    script.turn()
    script.open()
    assert pulls(script.turn()) == {5: ADDRESS}
    script.join(5, "oslo")
    assert pulls(script.turn()) == {5: ADDRESS}
    script.join(0)
    script.open()
    assert script.turn() == [(0, OpenGate())]


def test_a_link_that_breaks_is_made_again_and_said(script):
    """Not at once, in a new epoch, and with the place's name for the user."""
    script.join(5, "oslo")
    script.turn()
    script.open()
    ((_, joined),) = script.turn()
    script.now = time.monotonic()
    assert not script.places.link_down(script.at(5), LinkDown(joined.epoch + 7, "of another link"))
    assert script.places.link_down(script.at(5), LinkDown(joined.epoch, "no answer from the gate"))
    assert script.warned == ["relay 5 of place oslo: no answer from the gate; linking again"]
    assert script.turn(seconds=0.1) == []
    ((_, again),) = script.turn(seconds=5.0)
    assert again.epoch > joined.epoch
