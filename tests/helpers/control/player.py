"""A rollout that a test plays, message by message: what it holds, what it answers, and what befalls it. It
reads when it is told to, so that anything may happen while messages are on their way."""

import os
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from helpers.control.script import Script, samples_of
from helpers.made import Made, stored
from laminar_hpc.line.messages.data import Message, Partial, PromptGroup, ReplicaLoad, Sample, VersionSpan
from laminar_hpc.line.messages.homes import replica_of
from laminar_hpc.line.messages.membership import Failure, Goodbye, Hello, Ping, Rejoin, Stop, Welcome
from laminar_hpc.line.messages.moves import (
    Import,
    Imported,
    MoveAbort,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)
from laminar_hpc.line.messages.rollouts import (
    Drop,
    EngineHung,
    Generated,
    Grant,
    Holds,
    Increment,
    Leaving,
    Lost,
    NotLoaded,
    RequestWork,
    Scored,
    ScoreOrder,
    Unfinished,
    WeightsAvailable,
    WeightsOpened,
)
from laminar_hpc.rollout.partial_response import columns


@dataclass
class World:
    """What all players share. `fails`: how likely a step that may fail does; `homes`: whether environments
    stay where they were made."""

    script: Script
    chance: random.Random
    fails: float = 0.15
    homes: bool = False
    slots: list[int] = field(default_factory=list)  # weight ids that can be loaded, oldest first

    def hear(self, identity: str, message: Message) -> None:
        """At the controller, in a turn of its own or with others."""
        self.script.hub.arrived.append((identity, message))
        if self.chance.random() < 0.7:
            self.script.controller.turn()

    def may_fail(self) -> bool:
        return self.chance.random() < self.fails


@dataclass
class Held:
    """A trajectory that it generates."""

    attempt: int
    group: PromptGroup
    weight_id: int
    tokens: int
    home: str
    moves: int = 0


def _tokens(trajectory_id: int, begin: int, end: int) -> tuple[bytes, bytes]:
    return columns([(trajectory_id + place) % 50 for place in range(begin, end)], [-1.0] * (end - begin))


class Player:
    def __init__(self, world: World, index: int, life: str) -> None:
        self.world, self.index, self.life = world, index, life
        self.identity = f"rollout:{index}:{life}"
        self.weight_id: int | None = None
        self.newest_batch: int | None = None
        self.is_gone = self._asked = self._rejoins = False
        self.held: dict[int, Held] = {}
        self._grants, self._inbox = deque[Grant](), deque[Message]()
        self._scoring: dict[int, int] = {}  # trajectory -> attempt
        self._reserved: dict[str, Reserve] = {}
        self._imported: dict[str, Import] = {}
        self._ordered: dict[str, int] = {}  # moves away -> trajectory
        self._hello()

    def _say(self, message: Message) -> None:
        if not self.is_gone:
            self.world.hear(self.identity, message)

    def _hello(self, rejoins: bool = False) -> None:
        self._say(Hello("rollout", self.index, self.life, os.getpid(), "one", rejoins))

    # ---- what it reads -------------------------------------------------------------------------------------

    def reads(self) -> bool:
        """One message, if there is any."""
        self._inbox.extend(self.world.script.hub.left.pop(self.identity, []))
        if self.is_gone or not self._inbox:
            return False
        match message := self._inbox.popleft():
            case Grant():
                self.newest_batch, self._asked = message.batch_id, False
                self._grants.append(message)
            case Drop():
                for sample in message.samples:
                    self._drops(sample)
            case ScoreOrder():
                self._scoring[message.trajectory_id] = message.attempt
            case Welcome() if self._rejoins:
                self._says_what_it_holds()
            case Rejoin():
                self.joins_anew()
            case Stop() | Failure():
                self.is_gone = True
            case WeightsAvailable():
                self._asked = False
            case _:
                self._reads_of_moves(message)
        return True

    def _reads_of_moves(self, message: Message) -> None:
        match message:
            case Reserve() if message.move_id not in self._reserved:
                if not self.held or self.weight_id != message.weight_id or self.world.may_fail():
                    return self._say(MoveFailed(message.move_id, "it has no room"))
                self._reserved[message.move_id] = message
                self._say(Reserved(message.move_id, ""))
            case MoveOrder():
                held, moving = self.held.get(message.trajectory_id), self._ordered.values()
                here = held is not None and held.attempt == message.attempt
                if not here or message.trajectory_id in moving or self.world.may_fail():
                    return self._say(MoveFailed(message.move_id, "it does not run here"))
                self._ordered[message.move_id] = message.trajectory_id
                self._say(MoveReady(message.move_id, self._so_far(message.trajectory_id)))
            case Import() if message.move_id in self._reserved:
                self._imported[message.move_id] = message
                self._say(Imported(message.move_id, 0))
            case MoveCommit() if message.move_id in self._ordered:
                self.held.pop(self._ordered.pop(message.move_id), None)
            case MoveCommit() if message.move_id in self._imported:
                self._owns(message)
            case MoveAbort():
                for known in (self._ordered, self._reserved, self._imported):
                    known.pop(message.move_id, None)
        return None

    def _owns(self, commit: MoveCommit) -> None:
        reserve, part = self._reserved.pop(commit.move_id), self._imported.pop(commit.move_id).partial
        weight_id = part.spans[0].weight_id if part.spans else reserve.weight_id
        held = Held(commit.attempt, reserve.group, weight_id, part.count, part.home, part.moves + 1)
        self.held[reserve.trajectory_id] = held

    def _drops(self, dropped: Sample) -> None:
        held = self.held.get(dropped.trajectory_id)
        if held is not None and held.attempt == dropped.attempt:
            del self.held[dropped.trajectory_id]
        for group in [group for grant in self._grants for group in grant.groups]:
            group.samples = [sample for sample in group.samples if sample != dropped]

    def _says_what_it_holds(self) -> None:
        self._rejoins = self._asked = False
        generating = {i: held.attempt for i, held in self.held.items()}
        for grant in self._grants:
            generating |= samples_of(grant)
        both = [[Sample(*item) for item in each.items()] for each in (generating, self._scoring)]
        self._say(Holds(self.weight_id, self.newest_batch, *both, sorted(self._imported)))
        for i, held in self.held.items():
            part = self._so_far(i)
            told = Increment(i, held.attempt, 0, part.tokens, part.logprobs, part.spans, 1.0, home=held.home)
            self._say(told)
        for move_id, i in self._ordered.items():
            self._say(MoveReady(move_id, self._so_far(i)))
        for move_id in self._reserved:
            is_here = move_id in self._imported
            self._say(Imported(move_id, 0) if is_here else Reserved(move_id, ""))

    def _so_far(self, trajectory_id: int) -> Partial:
        held = self.held[trajectory_id]
        spans = [VersionSpan(held.weight_id, 0, held.tokens)] if held.tokens else []
        return Partial(*_tokens(trajectory_id, 0, held.tokens), spans, 1.0, held.moves, home=held.home)

    # ---- what it does --------------------------------------------------------------------------------------

    def goes_on(self) -> None:
        """Without anything in hand it begins a grant, pulls, or asks for work."""
        if self.held or self._reserved or self.is_gone:
            return
        newest = self.world.slots[-1]
        if self._grants:
            self._begins(self._grants.popleft())
        elif self.weight_id is None or self.weight_id < newest:
            self._opens(newest)
        elif not self._asked:
            self._asked = True
            self._say(RequestWork(self.weight_id, self.newest_batch))

    def _opens(self, weight_id: int) -> None:
        self.weight_id, self._asked = weight_id, False
        step = self.world.script.controller.weights.steps[weight_id]
        self._say(WeightsOpened(weight_id, step, 0.1, {}, [], 0.0))

    def _begins(self, grant: Grant) -> None:
        if grant.parts and grant.weight_id != self.weight_id:
            if grant.weight_id not in self.world.slots or self.world.may_fail():
                self._asked = False
                return self._say(NotLoaded(grant.batch_id, "it is in no slot"))
            self._opens(grant.weight_id)
        for group in grant.groups:
            for sample in group.samples:
                i, attempt = sample.trajectory_id, sample.attempt
                if grant.weight_id != self.weight_id:
                    self._say(Lost(i, attempt, "it serves newer weights by now"))
                    continue
                part, chance = grant.parts.get(i) or Partial(), self.world.chance
                lives = f"{chance.randrange(3)}:{i}:{attempt}:0"
                home = part.home or (lives if self.world.homes and chance.random() < 0.5 else "")
                self.held[i] = Held(attempt, group, grant.weight_id, part.count, home, part.moves)
        return None

    def pings(self, kv_free: int) -> None:
        phase = "unverified" if self.weight_id is None else "draining" if self.held else "open"
        used = 10_000 - kv_free
        load = ReplicaLoad(phase, self.weight_id, len(self.held), 0, kv_capacity=10_000, kv_tokens=used)
        self._say(Ping(load))

    def generates(self, trajectory_id: int, tokens: int) -> None:
        if trajectory_id in self._ordered.values():
            return
        held = self.held[trajectory_id]
        begin, held.tokens = held.tokens, held.tokens + tokens
        told, spans = (
            _tokens(trajectory_id, begin, held.tokens),
            VersionSpan(held.weight_id, begin, held.tokens),
        )
        more = Increment(trajectory_id, held.attempt, begin, *told, [spans], 1.0, home=held.home)
        self._say(more)

    def ends(self, trajectory_id: int) -> None:
        """It has its last token."""
        if trajectory_id in self._ordered.values():
            return
        held = self.held.pop(trajectory_id)
        tokens = [(trajectory_id + place) % 50 for place in range(held.tokens + 1)]
        whose = (trajectory_id, held.group.group_id, held.group.prompt_tokens)
        made = Made(*whose, tokens, [-1.0] * len(tokens), attempt=held.attempt, replica=self.index)
        made.weight_id = held.weight_id
        elsewhere = held.home if held.home and replica_of(held.home) != self.index else ""
        run_dir = Path(self.world.script.controller.config.run_dir)
        self._say(Generated(stored(run_dir, made), home=elsewhere))
        if not elsewhere:
            self._scoring[trajectory_id] = held.attempt

    def scores(self) -> None:
        """All that it was to score."""
        scoring, self._scoring = self._scoring, {}
        for i, attempt in scoring.items():
            self._say(Scored(i, attempt, float(self.world.chance.random() < 0.5), {}, "", 3.0))

    # ---- what befalls it -----------------------------------------------------------------------------------

    def loses(self, trajectory_id: int) -> None:
        if trajectory_id not in self._ordered.values():
            attempt = self.held.pop(trajectory_id).attempt
            self._say(Lost(trajectory_id, attempt, "the engine has refused it"))

    def hangs(self) -> None:
        """Its engine: another one starts, without weights."""
        self._say(EngineHung("it stands still"))
        self._hands_over()
        for move_id in self._reserved:
            self._say(MoveFailed(move_id, "its engine failed"))
        self.weight_id, self._asked = None, False
        for known in (self._ordered, self._reserved, self._imported):
            known.clear()

    def _hands_over(self) -> None:
        for i, held in self.held.items():
            part = self._so_far(i) if self.world.chance.random() < 0.7 else Partial()
            self._say(Unfinished(i, held.attempt, part))
        self.held.clear()

    def leaves(self, reads: int) -> None:
        """It was told to end, and reads some messages meanwhile."""
        self._say(Leaving())
        for _ in range(reads):
            self.reads()
        self._hands_over()
        self._say(Goodbye())
        self.is_gone = True

    def dies(self) -> None:
        self._say(Failure("it has died"))
        self.is_gone = True

    def joins_anew(self) -> None:
        """The controller is another one, or had taken it for dead: what was on its way here is lost."""
        self._inbox.clear()
        self.world.script.hub.left.pop(self.identity, None)
        self._rejoins = True
        self._hello(rejoins=True)
