"""The chain of relays as the controller sees it: trainer -> relay -> relay -> ..., one link between any two
neighbours.

Each link is made in an epoch of its own, and lasts until one of its ends goes or reports it broken; the
others stay as they are. Who misses the newest weights gets them from the relay before it. A relay that is
silent, or whose neighbour cannot reach it, is left out until its next message, and then comes to the chain's
end. While there is no trainer, relays pass on what one of them holds. Pure state: methods take what happened
and return messages, (place, message).

Each lane has a chain of its own, through its relay of every machine; relay number i belongs to lane i modulo
the number of lanes.
"""

from dataclasses import dataclass, field
from typing import Final

from laminar_hpc.line.messages.chain import CutLink, EpochProposed, JoinEpoch, SendAgain, StoreOpened
from laminar_hpc.line.messages.data import Message
from laminar_hpc.policies.chain import chain_order, missing

Place = int | None  # in the chain: a relay by its index, or TRAINER at its head
TRAINER: Final = None
QUIET_SECONDS = 0.5  # newcomers wait for one another, so that a run starts with one chain
# from a broken link to a new one: by then both ends, and those behind them, have said what they know
SETTLE_SECONDS = 0.2
SILENT_SECONDS = 3.0  # a relay says something once a second
_STRIKES = 3  # links in a row over which a relay received nothing
_EXILE_SECONDS = 10.0

Orders = list[tuple[Place, Message]]


@dataclass
class ChainLink:
    """A link of the chain, as its two ends were told."""

    epoch: int
    upstream: Place
    downstream: int

    def peer(self, reporter: Place) -> Place:
        return self.downstream if reporter == self.upstream else self.upstream


@dataclass
class Chain:
    """Of lane `lane` of `lanes`. `wanted`: relays that the first chain waits for."""

    wanted: int
    lane: int = 0
    lanes: int = 1
    order: list[int] = field(default_factory=list)
    links: dict[int, ChainLink] = field(default_factory=dict)  # by the receiving end
    has: dict[int, int] = field(default_factory=dict)  # newest complete weight id of each relay
    coming: dict[int, int] = field(default_factory=dict)  # newest id on its way to a relay
    first_epoch: int = 0  # no epoch before it is used again
    issued: int | None = None  # the newest id that the trainer has asked for
    epoch: int = 0
    _changed: float = 0.0
    _settled: float = 0.0
    _formed: bool = False
    # when a neighbour said that it does not reach this relay
    _blamed: dict[int, float] = field(default_factory=dict)
    _strikes: dict[int, int] = field(default_factory=dict)
    _exiled: dict[int, float] = field(default_factory=dict)  # until when

    def __post_init__(self) -> None:
        self.epoch = self.first_epoch * self.lanes + self.lane  # grows by `lanes`, so it tells its lane

    # ---- what happens --------------------------------------------------------------------------------------

    def joined(self, index: int, now: float) -> None:
        """A relay has said Hello: whatever was known of an earlier life is void."""
        self.left(index)
        self._changed = now

    def left(self, index: int) -> None:
        for known in (self.has, self._blamed, self._strikes, self._exiled):
            known.pop(index, None)
        self._leave_out(index)

    def sender_left(self) -> Orders:
        """The trainer's end of the chain is gone for good; the links between relays stay."""
        self.issued = None
        heads = [link for link in self.links.values() if link.upstream is TRAINER]
        return [order for link in heads for order in self._cut(link)]

    def _cut(self, link: ChainLink | None) -> Orders:
        """Its sender no longer stands before that relay, and nobody else does."""
        if link is None:
            return []
        self._drop(link)
        return [(link.downstream, CutLink(link.epoch))]

    def _leave_out(self, index: int) -> None:
        for link in [link for link in self.links.values() if index in (link.upstream, link.downstream)]:
            self._drop(link)
        self.order = [i for i in self.order if i != index]

    def _drop(self, link: ChainLink) -> None:
        self.links.pop(link.downstream, None)
        self._not_coming(link.downstream)

    def _not_coming(self, index: int) -> None:
        """What was on its way to this relay will reach neither it nor those behind it."""
        for behind in self.order[self.order.index(index) :] if index in self.order else [index]:
            self.coming.pop(behind, None)

    def _link(self, epoch: int) -> ChainLink | None:
        return next((link for link in self.links.values() if link.epoch == epoch), None)

    def link_down(self, epoch: int, reporter: Place, now: float) -> ChainLink | None:
        """The link that broke, if it is one of the present ones."""
        link = self._link(epoch)
        if link is None or reporter not in (link.upstream, link.downstream):
            return None
        self._drop(link)
        self._settled = now + SETTLE_SECONDS
        if (peer := link.peer(reporter)) is not None:
            self._blamed[peer] = now  # until its next message
        strikes = self._strikes[link.downstream] = self._strikes.get(link.downstream, 0) + 1
        if strikes >= _STRIKES and len(self.order) > 1:
            self._strikes.pop(link.downstream)
            self._exiled[link.downstream] = now + _EXILE_SECONDS
        return link

    def relay_has(self, index: int, weight_id: int, passed_on: int | None) -> None:
        """`passed_on`: whether the next relay gets them too; its link may be younger than they are here."""
        self.has[index] = max(weight_id, self.has.get(index, weight_id))
        self._strikes.pop(index, None)
        behind = next((link for link in self.links.values() if link.upstream == index), None)
        if (
            behind is not None
            and behind.epoch != passed_on
            and self.coming.get(behind.downstream, weight_id) <= weight_id
        ):
            self._not_coming(behind.downstream)

    # ---- what to do about it -------------------------------------------------------------------------------

    def update(self, last_seen: dict[int, float], trainer: bool, now: float) -> Orders:
        """Forms the chain anew if it has to be, then serves who misses the newest weights. `last_seen`: when
        the newest message of each relay came; `trainer`: whether there is one to send."""
        if now < self._settled or not (trainer or self.has):
            return []
        fit = [i for i, at in last_seen.items() if self._is_fit(i, at, now)]
        if not self._formed and (len(fit) < self.wanted or not fit):
            return []
        fit = fit or [
            i for i in self.order if i in last_seen
        ]  # a chain of silent relays is no worse than none
        if now - self._changed < QUIET_SECONDS:
            fit = [i for i in fit if i in self.order]
        for index in set(self.order) - set(fit):
            self._leave_out(index)
        self._formed = self._formed or bool(fit)
        return self._form(fit, trainer) + self._serve()

    def _is_fit(self, index: int, last_seen: float, now: float) -> bool:
        return (
            now - last_seen < SILENT_SECONDS
            and last_seen > self._blamed.get(index, -1.0)
            and now > self._exiled.get(index, -1.0)
        )

    def _form(self, fit: list[int], trainer: bool) -> Orders:
        """A link between any two neighbours that have none; none to the first relay without a trainer."""
        if set(self.order) != set(fit):
            will_have = {
                i: max(ids)
                for i in fit
                if (ids := [held[i] for held in (self.has, self.coming) if i in held])
            }
            self.order = chain_order(self.order, fit, will_have)
        order = self.order
        orders: Orders = []
        for place, (upstream, downstream) in enumerate(zip([TRAINER, *order], order, strict=False)):
            link = self.links.get(downstream)
            if link is not None and link.upstream == upstream:
                continue
            if upstream is TRAINER and not trainer:
                orders += self._cut(link)
                continue
            self.epoch += self.lanes
            self._not_coming(downstream)
            self.links[downstream] = ChainLink(self.epoch, upstream, downstream)
            issued = self.issued
            resend = issued is not None and all(self.has[i] < issued for i in order if i in self.has)
            orders.append((upstream, EpochProposed(self.epoch, order[place:], resend)))
        return orders

    def _serve(self) -> Orders:
        """The relay before the first that misses the newest weights, and that they are not on their way to,
        sends them again."""
        stretch = missing(self.order, self.has, self.coming)
        if stretch is None:
            return []
        begin, end = stretch
        for index in self.order[begin:end]:
            self.coming[index] = max(self.has.values())
        return [(self.order[begin - 1], SendAgain(self.links[self.order[begin]].epoch, end - begin))]

    def publication(self, weight_id: int) -> int:
        """The trainer is about to send these weights: how many relays will have them from one another. Who
        stands behind a broken link is served when it is mended."""
        self.issued = weight_id
        reached = next(
            (place for place, index in enumerate(self.order) if index not in self.links), len(self.order)
        )
        for index in self.order[:reached]:
            self.coming[index] = weight_id
        return reached

    def store_opened(self, opened: StoreOpened, reporter: Place) -> Orders:
        link = self._link(opened.epoch)
        if link is None or link.upstream != reporter:
            return []
        peer = "the trainer" if reporter is None else f"relay {reporter}"
        return [(link.downstream, JoinEpoch(opened.epoch, opened.host, opened.port, peer))]
