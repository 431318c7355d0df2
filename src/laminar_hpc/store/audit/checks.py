"""All that must hold of a run's records, in the order in which it is shown; docs/promises.md#audited.

A check is a function that looks at one thing after the other and yields a line for each that breaks the
promise, None for each that keeps it.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from laminar_hpc.store.audit import archived, origins, sealed, steps, trajectories
from laminar_hpc.store.audit.records import Records, StoreRecords

SHOWN = 10  # culprits of one check


@dataclass
class AuditFinding:
    """What one check has found: of `looked_at` things, `wrong` are culprits, the first of which are named."""

    name: str
    looked_at: int = 0
    wrong: int = 0
    culprits: list[str] = field(default_factory=list)

    def take(self, lines: Iterable[str | None]) -> "AuditFinding":
        """A line for a culprit, None for a thing that is as it should be."""
        for line in _all(lines):
            self.looked_at += 1
            if line is not None:
                self.wrong += 1
                if len(self.culprits) < SHOWN:
                    self.culprits.append(line)
        return self


def _all(lines: Iterable[str | None]) -> Iterator[str | None]:
    try:
        yield from lines
    except (ValueError, TypeError, sqlite3.Error) as error:  # a value of the records is none of ours
        yield f"what is on record cannot be checked ({error})"


Check = Callable[[Records, StoreRecords], Iterator[str | None]]


CHECKS: dict[str, Check] = {
    "every step has its groups": steps.batches_are_whole,
    "trained as the trainer says, once": steps.trained_once,
    "figures of each step are its batch's": steps.figures_agree,
    "staleness is within its bound": steps.staleness_is_bounded,
    "all ids are on record": trajectories.all_on_record,
    "each trajectory has one state": trajectories.one_state_each,
    "scores agree with their rows": trajectories.scores_agree,
    "groups and trajectories agree": trajectories.groups_agree,
    "given up for a reason": trajectories.given_up_for_a_reason,
    "finished in one order": trajectories.finished_in_one_order,
    "weight ids rise": origins.weight_ids_rise,
    "weight ids have one step": origins.weight_ids_are_known,
    "attempts rise": origins.attempts_rise,
    "one policy, unless they may mix": origins.one_policy,
    "responses have their digests": origins.responses_are_intact,
    "archived responses have theirs": archived.archived_are_intact,
    "rows are as they were written": sealed.rows_are_as_written,
    "metrics are as they were written": sealed.lines_are_as_written,
}


def audit(records: Records) -> list[AuditFinding]:
    """All checks, in the order in which they are shown."""
    damage = None if records.is_replay else records.damage or None
    findings = [AuditFinding("the store can be read").take([damage])]
    findings.append(AuditFinding("steps follow on each other").take(steps.steps_follow(records)))
    if records.store is not None:
        findings += [AuditFinding(name).take(check(records, records.store)) for name, check in CHECKS.items()]
    return findings
