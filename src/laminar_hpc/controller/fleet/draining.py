"""Replicas that leave in order, because they were told to end: they get nothing new, and what they generate
moves to others while they go on with it.

    replica --Leaving--> `move_away`, each tick -> a move to whoever generates on the same weights
                                                -> else its KV cache to a relay (trajectories/parking.py)
            --Unfinished--> what did not move in time goes on elsewhere from its tokens
            (controller/trajectories/failover.py)
            --Goodbye--> as with any lost replica; others score what it has not

Owns which destinations were tried. Where KV caches move, the trajectory's goes along.
"""

import time
from collections.abc import Sequence

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.shared import HearsOfLosses
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.failover import Failover
from laminar_hpc.controller.trajectories.migration import Migration
from laminar_hpc.controller.trajectories.parking import Parking
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.line.messages.rollouts import Leaving, Unfinished
from laminar_hpc.policies import failover
from laminar_hpc.policies.moves import room


class Draining:
    """Called for Leaving and Unfinished, and at each tick; see the top of this file."""

    def __init__(
        self,
        tables: Tables,
        migration: Migration,
        failover: Failover,
        parking: Parking,
        told: Sequence[HearsOfLosses],
    ) -> None:
        """`told`: the parts that treat a replica that leaves as one that is lost."""
        self._shared = tables
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._migration = migration
        self._failover = failover
        self._parking = parking
        self._told = told
        self._tried: set[tuple[int, str, int]] = set()  # (trajectory, role, whom)

    def on_leaving(self, member: Member, _: Leaving) -> None:
        replica = member.hello.index
        if replica not in self._replicas.leaving():
            self._replicas.leaves(replica)
            running = len(self._tracker.groups.holders.generating(replica))
            self._shared.say(f"{member.name} was told to end and leaves; {running} responses move to others")
            self._shared.metrics.write("leaving", replica=replica, trajectories=running)
        for part in self._told:
            part.replica_lost(replica)

    def on_unfinished(self, member: Member, message: Unfinished) -> None:
        trajectory_id, attempt = message.trajectory_id, message.attempt
        if self._tracker.owners.counts_as(trajectory_id, attempt):
            self._failover.given_back(member.hello.index, trajectory_id, attempt, message.partial)

    def move_away(self) -> None:
        """Begins a move of each trajectory that a leaving replica generates, to another replica or to a relay
        of its place; each is asked once for each. KV caches cross no link between places: what stays goes on
        elsewhere from its tokens."""
        leaving = self._replicas.leaving()
        if not leaving:
            self._tried.clear()
            return
        now, all_rooms, place_of = time.monotonic(), self._failover.rooms(), self._shared.members.place
        for source in leaving:
            place = place_of("rollout", source)
            near = [room for room in all_rooms if place_of("rollout", room.replica) == place]
            rooms = near if self._migration.with_kv else all_rooms
            relays = self._parking.relays(place)
            row = self._replicas.at(source)
            if row.report is None or row.weight_id is None:
                continue
            generating = self._tracker.groups.holders.generating(source)
            views = {
                i: failover.Orphan(
                    i, sample.weight_id if row.held else row.weight_id, self._tokens(i, row.report), 0
                )
                for _, i, sample in generating
                if i not in self._migration.moving
            }
            attempts = {i: sample.attempt for _, i, sample in generating}
            placed = failover.redirect(list(views.values()), rooms)
            for i, view in views.items():
                destination = placed.get(i)
                relay = next((each for each in relays if (i, "relay", each) not in self._tried), None)
                if destination is not None and (i, "rollout", destination) not in self._tried:
                    self._tried.add((i, "rollout", destination))
                    where = (source, destination, view.weight_id)
                    self._migration.begin(i, attempts[i], *where, view.tokens, now)
                elif relay is not None:
                    self._tried.add((i, "relay", relay))
                    self._parking.park(i, attempts[i], source, relay, view.weight_id, now)

    def _tokens(self, trajectory_id: int, report: ReplicaLoad) -> int:
        """Room for it: prompt, response so far, and some more."""
        prompt = len(self._tracker.groups.bare(trajectory_id).prompt_tokens)
        response_max = self._shared.config.sampling.max_response_tokens
        return room(prompt, response_max, report.held_tokens, report.in_flight)
