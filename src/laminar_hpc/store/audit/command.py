"""`laminar audit RUN_DIR [--json PATH]`: the checks as a table, culprits below. Exit codes: 0 = clean,
1 = culprits, 2 = no run."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.store.audit.checks import AuditFinding, audit
from laminar_hpc.store.audit.records import Records, read
from laminar_hpc.store.audit.sealed import not_proven
from laminar_hpc.store.old_steps import GIVEN_UP

# state in the store -> what it means for the run
_MEANINGS = {
    "consumed": "trained",
    "finished": "waiting",
    "generated": "without a score",
    "granted": "in progress",
    "given_up": "given up",
}


def main(options: Namespace) -> int:
    """The exit code, 0 or 1. Raises LaminarError for what is no run."""
    with read(Path(options.words[0])) as records:
        findings = audit(records)
        summary = _summary(records, findings)
    for line in _lines(summary, findings):
        print(line)
    if options.json:
        _write(Path(options.json), summary)
    return int(not summary["clean"])


def _summary(records: Records, findings: list[AuditFinding]) -> dict:
    """What --json writes."""
    store = records.store
    states = Counter(t.state for t in store.trajectories) if store else Counter[str]()
    for old in store.old_steps.values() if store else ():
        states["given_up" if old.consumed_step == GIVEN_UP else "consumed"] += old.trajectories
    reasons = Counter(
        str(store.groups[t.group_id].reason)
        for t in (store.trajectories if store else [])
        if store and t.state == "given_up" and t.group_id in store.groups
    )
    if store and GIVEN_UP in store.old_steps:
        reasons["of what metrics.jsonl says of old steps"] += store.old_steps[GIVEN_UP].trajectories
    return {
        "clean": not any(finding.wrong for finding in findings),
        "run_dir": str(records.run_dir),
        "store_id": store.meta.get("store_id", "") if store else "",
        "launches": len(records.launches),
        "steps": records.steps_done(),
        "newest_checkpoint": max(records.checkpoints, default=None),
        "trajectories": {meaning: states.pop(state, 0) for state, meaning in _MEANINGS.items()},
        "given_up_because": dict(reasons.most_common()),
        "not_proven": not_proven(records),
        "checks": [
            {"name": f.name, "looked_at": f.looked_at, "wrong": f.wrong, "culprits": f.culprits}
            for f in findings
        ],
    }


def _lines(summary: dict, findings: list[AuditFinding]) -> list[str]:
    newest = summary["newest_checkpoint"]
    head = (
        f"{Path(summary['run_dir']).resolve().name}  step {summary['steps']}  "
        f"newest checkpoint {'none' if newest is None else f'of step {newest}'}  "
        f"launches {summary['launches']}  store {summary['store_id'] or 'none'}"
    )
    states = ", ".join(f"{count:,} {meaning}" for meaning, count in summary["trajectories"].items())
    lines = [head, f"trajectories: {states}"]
    lines += [f"  given up: {count:,} because {why}" for why, count in summary["given_up_because"].items()]
    lines += ["", f"{'check':<36}{'looked at':>12}{'wrong':>8}"]
    lines += [f"{f.name:<36}{f.looked_at:>12,}{f.wrong or '-':>8}" for f in findings]
    lines += ["", *([summary["not_proven"], ""] if summary["not_proven"] else [])]
    for finding in findings:
        if finding.wrong:
            lines.append(f"{finding.name}:")
            lines += [f"  {culprit}" for culprit in finding.culprits]
            if finding.wrong > len(finding.culprits):
                lines.append(f"  and {finding.wrong - len(finding.culprits):,} more")
    wrong = sum(finding.wrong for finding in findings)
    lines.append("clean" if summary["clean"] else f"{wrong:,} culprits")
    return lines


def _write(path: Path, summary: dict) -> None:
    try:
        write_whole(path, json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise LaminarError(f"--json {path} cannot be written ({error.strerror}); name another file") from None
