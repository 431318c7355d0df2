"""What happens to trajectories of several turns between their turns, on the clock of rollouts.py.

waits for                        unblocked by
its environment: reset, calls    returned
its request's way to the engine  enter
"""

from typing import TYPE_CHECKING

from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.turns.course import Took
from laminar_hpc.simulator.turns.environments import Environments, Play

if TYPE_CHECKING:
    from laminar_hpc.simulator.rollouts import Rollouts

_Sign = tuple[int, float, int]


def _sign(request: SimulatedRequest) -> _Sign:
    """By which it is known whether a request was lost and given out again meanwhile."""
    return request.turn, request.granted, request.play.failures


class TurnEvents:
    """Of all replicas. `begun[replica]`: trajectories of its present local batch."""

    def __init__(self, rollouts: "Rollouts", environments: Environments) -> None:
        self.rollouts = rollouts
        self.environments = environments
        self.begun: dict[int, int] = {}

    def begin(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        """Begins a trajectory at this replica, from its prompt. The caller settles the replica."""
        request.turns = request.play.anew()
        request.remaining = float(request.turns[0])
        took = self.environments.reset(request.play, replica.index, self.rollouts.clock.now)
        if took.seconds or took.failed:
            self._wait(replica, request, took)
        else:
            self.environments.returned(request.play, replica.index, 0, self.rollouts.clock.now)
            self._go_on(replica, request)

    def turned(self, replica: SimulatedReplica, request: SimulatedRequest, time: float) -> bool:
        """Called when a turn has ended. Gives whether the trajectory has another one."""
        drawn = round(request.turns[request.turn - 1])
        took = self.environments.turned(request.play, replica.index, request.turn, drawn, time)
        if took is None:
            self.environments.ended(request.play)
            return False
        request.remaining = float(request.turns[request.turn])
        replica.park(request)
        self._wait(replica, request, took)
        return True

    def _wait(self, replica: SimulatedReplica, request: SimulatedRequest, took: Took) -> None:
        replica.state = "environment"
        replica.away[request.trajectory_id] = request
        request.away = True
        self.rollouts.clock.after(took.seconds, self.returned, request, _sign(request), took.failed)

    def returned(self, request: SimulatedRequest, was: _Sign, failed: bool) -> None:
        """Called when the calls of a turn, or the reset, have ended."""
        replica, play = request.home, request.play
        if replica is None or not request.away or was != _sign(request):
            return  # lost and given out again meanwhile
        now = self.rollouts.clock.now
        replica.advance(now)
        self.environments.returned(play, replica.index, request.turn, now)
        if failed:
            self._failed(replica, request)
        else:
            self._go_on(replica, request)
        self.rollouts.settle(replica)

    def _go_on(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        """Asks for the next turn with what the environment gave; ends the trajectory if that has no room."""
        play: Play = request.play
        given = self.environments.given(play, request.turn)
        if given is None:
            self._back(replica, request)
            self.environments.ended(play)
            self.rollouts.trajectory_ended(replica, request, self.rollouts.clock.now)
            return
        request.context += given
        request.uncached += given
        turns, room = list(request.turns), self.environments.room(play)
        turns[request.turn] = min(turns[request.turn], room)
        request.turns = turns
        request.remaining = float(turns[request.turn])
        play.ask(self.rollouts.clock.now, replica.place_free)
        if replica.costs.ask:
            replica.away[request.trajectory_id] = request
            request.away = True
            self.rollouts.clock.after(replica.costs.ask, self.enter, request, _sign(request))
        else:
            self._enter(replica, request)

    def enter(self, request: SimulatedRequest, was: _Sign) -> None:
        """Called when the request has come to the engine."""
        replica = request.home
        if replica is None or not request.away or was != _sign(request):
            return
        replica.advance(self.rollouts.clock.now)
        self._enter(replica, request)
        self.rollouts.settle(replica)

    def _enter(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        """Queues the request behind those that wait for a place."""
        self._back(replica, request)
        replica.waiting.append(request)

    def _back(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        request.away = False
        replica.unpark(request)
        replica.away.pop(request.trajectory_id, None)

    def _failed(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        """Starts over from the prompt in another environment, here or at whichever replica is next."""
        r = self.rollouts
        self._back(replica, request)
        young = 2 * replica.pending > self.begun.get(replica.index, 0)
        here = self.environments.failed(request.play, young)
        r.tracker.discarded_tokens += request.restart(request.group.prompt_tokens, request.weight_step)
        if here:
            self.begin(replica, request)
        else:
            replica.pending -= 1
            request.home = None
            r.tracker.lost.append(request)
            r.feed_hungry()
