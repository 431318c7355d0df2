"""Where trajectories come from: weight ids, attempts, and responses that are as they were generated."""

from collections.abc import Iterator

from laminar_hpc.store.audit.records import Records, StoreRecords


def weight_ids_rise(_: Records, store: StoreRecords) -> Iterator[str | None]:
    """Ids rise with restore epochs. Time is no measure: clocks are set back or differ."""
    epoch = 0
    for weights in store.weights:
        if weights.restore_epoch < epoch:
            yield f"weight id {weights.id}: of epoch {weights.restore_epoch}, after one of epoch {epoch}"
        else:
            yield None
        epoch = max(epoch, weights.restore_epoch)
    last = int(store.meta.get("restore_epoch", epoch))
    yield f"weight ids of epoch {epoch}, the store is at epoch {last}" if epoch > last else None


def weight_ids_are_known(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """Each id has one step, by all who name it; no response is on weights that were never published."""
    known: dict[int | None, int] = {weights.id: weights.step for weights in store.weights}
    for kind in ("publish", "pull"):
        for event in records.events.get(kind, []):
            weight_id, step = event.get("weight_id"), event.get("step")
            wrong = known.get(weight_id) != step
            yield (
                f"weight id {weight_id}: step {step} in metrics.jsonl, {known.get(weight_id)} in the store"
                if wrong
                else None
            )
    for t in store.trajectories:
        if t.weight_id not in known:
            yield f"trajectory {t.id}: weight id {t.weight_id} is not in the store"
        elif t.stored and t.weight_step > known[t.weight_id]:
            said = f"weight id {t.weight_id} of step {t.weight_step}"
            yield f"trajectory {t.id}: {said}, which is of step {known[t.weight_id]}"
        else:
            yield None


def one_policy(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """One policy drew each trajectory, unless a launch had a pipeline that mixes policies."""
    for t in store.trajectories if "interrupt" not in _pipelines(records) else ():
        wrong = t.policies not in (None, 1)
        yield f"trajectory {t.id}: {t.policies} policies drew its tokens" if wrong else None


def attempts_rise(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """No attempt is older than one that was lost; what is complete is of a later one."""
    lost: dict[int, int] = {}
    for event in records.events.get("lost", []):
        i, attempt = event.get("trajectory_id"), event.get("attempt")
        if isinstance(i, int) and isinstance(attempt, int) and not event.get("evaluation"):
            lost[i] = max(attempt, lost.get(i, attempt))
    for t in store.trajectories:
        before = lost.get(t.id)
        if t.attempt < 0:
            yield f"trajectory {t.id}: attempt {t.attempt}; attempts count from 0"
        elif before is not None and (t.attempt < before or (t.stored and t.attempt == before)):
            yield f"trajectory {t.id}: attempt {t.attempt}, after attempt {before} was lost"
        else:
            yield None


def _pipelines(records: Records) -> set[str | None]:
    """pipeline.refresh of each launch."""
    found = {launch.refresh for launch in records.launches}
    return found | ({(records.config.get("pipeline") or {}).get("refresh")} if None in found else set())


def responses_are_intact(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """Tokens and log-probs have the digest that their replica gave them; unless policies may mix, they were
    drawn by the weights on which their trajectory was granted."""
    may_mix = "interrupt" in _pipelines(records)
    rows, published = {t.id: t for t in store.trajectories}, {weights.id for weights in store.weights}
    for trajectory_id, response in store.responses():
        row = rows.get(trajectory_id)
        if row is None:
            yield f"trajectory {trajectory_id}: a response without a trajectory"
        elif response is None:  # archived since this audit began
            yield None
        elif isinstance(response, str):
            yield response
        elif (response.trajectory_id, response.attempt) != (row.id, row.attempt):
            yield (
                f"trajectory {row.id}: attempt {row.attempt}, its response is of trajectory "
                f"{response.trajectory_id}, attempt {response.attempt}"
            )
        elif row.digest != response.digest:
            yield f"trajectory {row.id}: tokens or log-probs are not those of its digest"
        elif len(response.tokens) != row.response_length:
            count = len(response.tokens)
            yield f"trajectory {row.id}: {count} tokens, {row.response_length} on record"
        elif response.trained != row.trained:
            yield f"trajectory {row.id}: {response.trained} drawn tokens, {row.trained} on record"
        elif len(drawn_by := {span.weight_id for span in response.spans}) != row.policies:
            yield f"trajectory {row.id}: {len(drawn_by)} policies drew its tokens, {row.policies} on record"
        elif not may_mix and drawn_by != {row.weight_id}:
            yield f"trajectory {row.id}: drawn by weight ids {sorted(drawn_by)}, {row.weight_id} on record"
        elif not drawn_by <= published:
            yield f"trajectory {row.id}: drawn by weight ids {sorted(drawn_by - published)}, not in the store"
        else:
            yield None
