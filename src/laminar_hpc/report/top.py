"""`laminar top RUN_DIR`: a run in the terminal, redrawn every second; `--once` prints one frame and exits.

Works on a run that goes on, has ended or died. Without a terminal (a pipe, a script) frames have no colours.
What the run's files hold is shown with escapes in place of control characters.
"""

import sys
import time
from argparse import Namespace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laminar_hpc.machine.observability.console import count, duration, eta, number
from laminar_hpc.machine.observability.output import printable
from laminar_hpc.report import forecast, replicas, turns
from laminar_hpc.report.live import SILENT_SECONDS, RunFollower, View
from laminar_hpc.store.status import RankStatus

REFRESH_SECONDS = 1.0
BAR = 10  # characters of the KV cache's bar
PIPE_WIDTH = 160  # of a frame that goes to a file or a pipe
_COLORS = {"going on": "green", "starting": "yellow", "ended": "cyan", "died": "red"}
_RANK_ORDER = ("trainer", "controller", "relay", "rollout")
_COLUMNS = (
    *("rank", "machine", "pid", "weights", "state"),
    *("running", "queued", "scoring", "KV cache", "tok/s", "last"),
)
_NUMBERS = ("pid", "running", "queued", "scoring", "tok/s")
# the first one first, on a narrow screen
_DROPPED = ("scoring", "pid", "queued", "last", "machine", "running", "KV cache", "tok/s")
_GAP = 2  # between two columns


def main(options: Namespace) -> int:
    """The exit code: 0, or 1 for `--once` on a run that died. Raises LaminarError for what is no run."""
    follower = RunFollower(Path(options.words[0]))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    if options.once:
        view = follower.look()
        console.print(frame(view, console.width))
        return int(view.state == "died")
    forecaster = forecast.Forecaster(follower.view.run_dir)
    try:
        first, whole = frame(follower.look(), console.width), sys.stdout.isatty()
        with Live(first, console=console, screen=whole, auto_refresh=False) as live:
            while follower.view.state in ("going on", "starting"):
                forecaster.look()
                time.sleep(REFRESH_SECONDS)
                live.update(frame(follower.look(), console.width), refresh=True)
    except KeyboardInterrupt:
        return 0
    finally:
        forecaster.close()
    if sys.stdout.isatty():  # the last frame stays when the screen is given back
        console.print(frame(follower.view, console.width))
    return 0


def frame(view: View, width: int = PIPE_WIDTH) -> Group:
    """One picture of the run, `width` columns wide."""
    parts: list = [_head(view), _progress(view), Text(), _ranks(view, width), Text()]
    lines = (_queues, _weights, _turns, _moves, _last_evaluations, _reward_errors)
    parts += [line for make in (*lines, _incidents, _replicas, _forecast) if (line := make(view))]
    return Group(*parts)


def _head(view: View) -> Text:
    text = Text(_plain(view.run_dir.resolve().name), style="bold")
    text.append(f"  {view.state}", style=_COLORS[view.state])
    if view.state == "ended":
        text.append(f": {_plain(view.reason)}")
    if view.state == "died":
        text.append(
            f": no end was recorded; last sign of life {duration(time.time() - view.last_sign)} ago; "
            "resume=auto goes on with it"
        )
    if view.status and view.status.stopping and view.state == "going on":
        text.append(f"  stopping ({_plain(view.status.stopping)})", style="yellow")
    age = duration(max(0.0, view.last_sign - view.begun))
    text.append(f"  pipeline {_plain(view.pipeline) or '-'}  age {age}", style="dim")
    return text


def _progress(view: View) -> Text:
    step = view.steps[-1] if view.steps else None
    done, wanted = (step["step"] if step else 0), view.wanted_steps
    text = Text(f"step {done}{f'/{wanted}' if wanted else ''}")
    if step is None:
        return text.append("  no step done yet")
    tokens = (step["prompt_tokens"] + step["response_tokens"]) / step["seconds"] if step["seconds"] else None
    left = None
    if wanted and view.state == "going on":
        left = eta([s["seconds"] for s in view.steps], wanted - done)
    stale = (number(step[f"staleness_training_{key}"], digits) for key, digits in (("mean", 2), ("max", 0)))
    parts = [
        f"reward {number(step['reward_mean'])}",
        f"accuracy {number(step['accuracy_mean'])}",
        "stale {} (max {})".format(*stale),
        f"{count(tokens)} tok/s",
        f"{duration(step['seconds'])}/step (wait {duration(step['wait_seconds'])})",
        *([f"eta {duration(left)}"] if left is not None else []),
    ]
    return text.append("  " + "  ".join(parts))


def _ranks(view: View, width: int) -> Table:
    """Live ranks from status.json with what each did last, by its trace; for an older run what the traces
    alone know. Machines are named where there are several. Columns that do not fit into `width` are left out,
    the least important ones first."""
    lasts = {name: _last(span, view.last_sign) for name, span in view.processes.items()}
    found = view.status.ranks if view.status else []
    ranks = sorted(found, key=lambda rank: (_RANK_ORDER.index(rank.role), rank.index))
    rows = [[*_rank_cells(rank, view), lasts.get(f"{rank.role}{rank.index}", "")] for rank in ranks]
    present = {f"{rank.role}{rank.index}" for rank in ranks}
    for name in [name for name in view.processes if name not in present]:
        gone = "gone" if view.status and name != "controller0" and view.state == "going on" else ""
        own = view.status if name == "controller0" else None
        place = [_host(own.machine), str(own.pid)] if own else ["", ""]
        rows.append([name, *place, "", gone, "", "", "", "", "", lasts[name]])
    columns = {
        name: [Text(_plain(cell)) if isinstance(cell, str) else cell for cell in cells]
        for name, *cells in zip(_COLUMNS, *rows, strict=True)
    }
    if len({_host(rank.machine) for rank in ranks}) < 2:
        del columns["machine"]
    for name in _DROPPED:
        widths = [max([len(head), *map(len, cells)]) + _GAP for head, cells in columns.items()]
        if sum(widths) - _GAP > width:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _rank_cells(rank: RankStatus, view: View) -> list[str | Text]:
    weights = f"id {rank.weight_id} (step {rank.weight_step})" if rank.weight_id is not None else "none yet"
    cells: list[str | Text] = [f"{rank.role}{rank.index}", _host(rank.machine), str(rank.pid), weights]
    silent = view.status.time - rank.heard if view.status else 0.0
    load = rank.load if view.state != "ended" else None
    if load is None:
        return [*cells, f"silent {duration(silent)}" if silent > SILENT_SECONDS else "", "", "", "", "", ""]
    state = f"silent {duration(silent)}" if silent > SILENT_SECONDS else load.phase
    numbers = (str(load.running), str(load.queued), str(load.scoring))
    bar = _bar(load.kv_tokens, load.kv_capacity)
    return [*cells, state, *numbers, bar, count(load.tokens_per_second)]


def _host(machine: str) -> str:
    """The name of a machine, as machine/processes.py `machine_name` begins with it."""
    return machine.partition("/")[0]


def _bar(used: int, capacity: int) -> Text:
    if capacity <= 0:
        return Text("-")
    share = min(1.0, used / capacity)
    full = round(share * BAR)
    text = Text("█" * full, style="green" if share < 0.9 else "red").append("░" * (BAR - full), style="dim")
    return text.append(f" {share:4.0%} of {count(capacity)}", style="default")


def _last(span: dict, now: float) -> str:
    if not span:
        return ""
    took, ago = span["t1"] - span["t0"], max(0.0, now - span["t1"])
    return f"{span['kind']} {duration(took)}, {duration(ago)} ago"


def _plain(text: str) -> str:
    """Puts a text on one line, with nothing that a terminal obeys."""
    return printable(" ".join(text.split()))


def _line(label: str, *parts: str) -> Text:
    return Text(f"{label:<10}", style="dim").append("  ".join(map(_plain, parts)), style="default")


def _queues(view: View) -> Text | None:
    if view.status is None or view.state == "ended":
        return None
    q = view.status.queues
    waits = f"trainer waits: {q.trainer_waits}" if q.trainer_waits else "trainer is at work"
    return _line(
        "queues",
        f"{q.generating} groups being generated",
        f"{q.ready} ready",
        f"{q.unscored} answers without a score",
        f"{q.replicas_waiting} replicas want work",
        *([f"{q.evaluations} evaluations"] if q.evaluations else []),
        waits,
    )


def _weights(view: View) -> Text | None:
    parts = []
    if published := view.newest.get("publish"):
        parts.append(
            f"id {published['weight_id']} published in {published['seconds']:.2f} s, trainer held up "
            f"{published['stall_seconds']:.3f} s"
        )
    if pull := view.newest.get("pull"):
        parts.append(f"last pull {pull['seconds']:.2f} s (replica {pull['replica']})")
    if mismatch := view.newest.get("logprob_mismatch"):
        parts.append(f"log-prob mismatch {mismatch['mean']:.1e}")
    return _line("weights", *parts) if parts else None


def _turns(view: View) -> Text | None:
    step = view.steps[-1] if view.steps else {}
    if step.get("turns_mean") is None:
        return None
    seconds = [f"{kind} {number(step.get(f'{kind}_seconds_mean'), 2)} s" for kind in turns.COLORS]
    calls, failed = (step.get(f"{k}_mean") for k in ("tool_calls", "failed_calls"))
    cached, busy = (step.get(f"{k}_mean") for k in ("cached_share", "busy_share"))
    return _line(
        "turns",
        f"{number(step['turns_mean'], 1)} per trajectory",
        f"{number(calls, 1)} tool calls, {number(failed, 2)} failed",
        *seconds,
        *([f"environments {busy:.0%} busy"] if busy is not None else []),
        *([f"{cached:.0%} of later prompts cached"] if cached is not None else []),
    )


def _moves(view: View) -> Text | None:
    """Of trajectories between replicas: how many, how the last one went, and the last plan carried out."""
    move, plan = view.newest.get("move"), view.newest.get("repack")
    if move is None:
        return None
    counts, source = view.counts, "a dead one" if move["source"] is None else move["source"]
    parts = [f"{counts['move']} trajectories moved, {counts.get('move_off', 0)} called off"]
    if rescued := counts["rescued"]:
        parts.append(f"{rescued} from dead replicas, {counts['loaded']} by loading their weights")
    parts.append(
        f"last {source} to {move['destination']} on id {move['weight_id']} in {move['seconds']:.2f} s: "
        f"{move['tokens']} tokens, {move['prefix_tokens']} of prefill saved"
    )
    if plan:
        parts.append(f"last plan emptied {len(plan['sources'])} of {plan['replicas']} replicas")
    return _line("moves", *parts)


def _last_evaluations(view: View) -> Text | None:
    several = len(view.evaluations) > 1
    parts = [
        f"{file if several else 'accuracy'} {number(e['accuracy'])} "
        f"({e['name']}, {e['label']}, step {e['step']})"
        for file, e in view.evaluations.items()
    ]
    return _line("held-out", *parts) if parts else None


def _incidents(view: View) -> Text | None:
    names = (
        ("lost", "attempts lost"),
        ("regranted", "replicas' work given to others"),
        ("given_up", "groups given up"),
    )
    parts = [f"{view.counts[kind]} {name}" for kind, name in names if kind in view.counts]
    return _line("incidents", *parts) if parts else None


def _replicas(view: View) -> Text | None:
    parts = replicas.parts(view.newest)
    return _line("replicas", *parts) if parts else None


def _forecast(view: View) -> Text | None:
    """What the run foretells of itself, a line for each setting."""
    line = forecast.newest(view.run_dir)
    if line is None:
        return None
    first, *others = forecast.parts(line)
    return Text("\n").join([_line("forecast", first), *(_line("", other) for other in others)])


def _reward_errors(view: View) -> Text | None:
    """While a launch goes on of all its responses, evaluations included; afterwards of the trained ones."""
    first, s = view.newest.get("reward_error"), view.status
    if first is None:
        return None
    trained = f"{view.counts.get('reward_errors', 0):,} trained trajectories"
    live = s is not None and s.rewards_scored and view.state == "going on"
    where = f"{s.reward_errors:,} of {s.rewards_scored:,} responses" if s and live else trained
    return _line("rewards", f"errors in {where}, the first: {first['text']}")
