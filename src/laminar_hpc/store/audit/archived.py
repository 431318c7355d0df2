"""The archive: what left the payload files is there, as it was generated."""

from collections.abc import Iterator

from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.files.durable import FileSum
from laminar_hpc.policies.retention import RULE, kept
from laminar_hpc.store.archive import files
from laminar_hpc.store.audit.records import OldStep, Records, StoreRecords, TrajectoryRow
from laminar_hpc.store.old_steps import digest_sum
from laminar_hpc.store.payload.layout import DamagedResponse, pack, packed_digest


def archived_are_intact(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """Each step that the setting keeps has its file, and each file the responses that the step trained."""
    archived = int(store.meta.get("archived_steps", 0))
    rule, present = str(records.config.get("archive", "all")), set(files.steps(records.run_dir))
    newest = max((archived, *present))  # the writer removes what the rule lets go before the store knows
    of_step: dict[int, dict[int, TrajectoryRow]] = {step: {} for step in range(1, archived + 1)}
    for t in store.trajectories:
        if t.consumed_step is not None and t.scored and t.consumed_step < archived:
            of_step[t.consumed_step + 1][t.id] = t
    for step, rows in of_step.items():
        if step in present:
            yield from _of_step(records, store, step, rows, store.old_steps.get(step - 1))
        elif RULE.fullmatch(rule) and kept(rule, step, newest):
            yield f"step {step}: the archive has no file of it (archive={rule})"


def _of_step(
    records: Records, store: StoreRecords, step: int, rows: dict[int, TrajectoryRow], old: OldStep | None
) -> Iterator[str | None]:
    path, seen = files.path_of(records.run_dir, step), set[int]()
    without_rows = dict[int, str]()  # trajectory -> its digest
    try:
        if (sha := store.archive_seal(step)) and path.exists():
            wrong = durable.difference(path, FileSum(path.stat().st_size, sha))
            yield f"step {step}: {path.name} {wrong}" if wrong else None
        elif records.all_sealed and not sha:
            yield f"step {step}: the store has lost the sum of {path.name}"
        for whole in files.read(path):
            i, digest = whole.record.trajectory_id, packed_digest(pack(whole.response))
            if i in seen:
                yield f"trajectory {i}: twice in {path.name}"
                continue
            seen.add(i)
            if not store.is_sealed_prompt(whole.record.group_id, whole.prompt.tobytes()):
                yield f"trajectory {i}: {path.name} does not have its prompt"
            if i not in rows and old is None:
                yield f"trajectory {i}: in {path.name}, which did not train it"
                continue
            if i not in rows:
                without_rows[i] = digest
            if digest != (rows[i].digest if i in rows else whole.record.digest):
                yield f"trajectory {i}: {path.name} does not have its tokens or log-probs"
            else:
                yield _differs(path.name, whole.record, rows[i].record()) if i in rows else None
    except (OSError, DamagedResponse) as error:
        if path.exists():  # else a live run has just removed it
            yield f"step {step}: {path.name} cannot be read ({error})"
        return
    for i in sorted(rows.keys() - seen):
        yield f"trajectory {i}: not in {path.name}, the file of the step that trained it"
    if old is not None:
        yield _sums_wrong(path.name, without_rows, old)


def _differs(name: str, archived: Trajectory, stored: Trajectory | None) -> str | None:
    """Says in which of the columns that both have the two records differ."""
    if archived == stored:
        return None
    fields = [f for f in archived.__struct_fields__ if getattr(archived, f) != getattr(stored, f, None)]
    return f"trajectory {archived.trajectory_id}: its {fields[0]} in {name} is not that of the store"


def _sums_wrong(name: str, found: dict[int, str], old: OldStep) -> str | None:
    """`found`: id and digest of the responses that are in the file and have no row in the store."""
    sums = len(found), sum(found), digest_sum(found.values())
    if sums == (old.trajectories, old.id_sum, int(old.digest_sum, 16)):
        return None
    return f"step {old.consumed_step + 1}: {name} does not hold what it trained, by the store's sums"
