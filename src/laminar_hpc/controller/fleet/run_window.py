"""What a run does with a number of replicas, over some trainer steps: sums for policies/scaling.py."""

from laminar_hpc.controller.tables import Tables
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.policies.scaling import ScalingWindow

_SAMPLE_SECONDS = 0.1  # between two looks at all replicas


class RunWindow:
    """`look` is called each turn, `step` at the end of each trainer step, `begin` where sums begin anew."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._replicas = tables.replicas
        self._looked = 0.0
        self._sampled = 0.0
        self.begin()

    def begin(self) -> None:
        self.steps = 0
        self._tokens = self._seconds = self._waited = 0.0
        self._replica_seconds = self._idle_seconds = 0.0
        self._in_hand = self._busy = 0
        self._decoding = list[int]()  # of replicas in which some requests wait

    def look(self, now: float, count: int) -> None:
        """`now`: monotonic seconds; `count` replicas serve weights."""
        passed = now - self._looked if self._looked else 0.0
        self._looked = now
        self._replica_seconds += passed * count
        self._idle_seconds += passed * min(count, len(self._replicas.waiting))
        if now - self._sampled > _SAMPLE_SECONDS:
            self._sampled = now
            in_hand = self._tables.tracker.groups.holders.generating_counts().values()
            self._in_hand += sum(in_hand)
            self._busy += sum(map(bool, in_hand))
            self._decoding += [load.running for load in self._loads() if load.queued and load.running]

    def step(self, record: dict) -> None:
        """The metrics of a step."""
        self.steps += 1
        self._tokens += record["response_tokens"]
        self._seconds += record["seconds"]
        self._waited += min(record["wait_seconds"], record["seconds"])

    def take(self, count: int) -> ScalingWindow:
        """The sums, over steps that had `count` replicas; then they begin anew."""
        curves = [load.decode_curve for load in self._loads() if load.decode_curve]
        config, decoding = self._tables.config, self._decoding
        at_once: float = config.rollout.max_concurrent
        window = ScalingWindow(
            steps=self.steps,
            tokens=self._tokens,
            seconds=self._seconds,
            waited=self._waited,
            replicas=count,
            idle=self._idle_seconds / self._replica_seconds if self._replica_seconds else 0.0,
            requests=self._in_hand / self._busy if self._busy else 0.0,
            curve=max(curves, key=lambda curve: curve[0][1], default=()),
            at_once=min(at_once, sum(decoding) / len(decoding)) if decoding else at_once,
            divides=config.pipeline.local_batch_groups is None,
        )
        self.begin()
        return window

    def _loads(self) -> list[ReplicaLoad]:
        return [row.report for row in self._replicas.rows().values() if row.report is not None]
