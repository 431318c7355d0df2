"""Scored trajectories with their prompts and columns, for whoever looks at some of them: reports, shown
samples, benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_hpc.line.messages.data import ResponsePlace, Trajectory
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.store.payload.layout import Response, Tokens
from laminar_hpc.store.payload.reader import LATE_SECONDS, read


@dataclass(frozen=True)
class Whole:
    """A record, its prompt [tokens] int32, and its response."""

    record: Trajectory
    prompt: Tokens
    response: Response


def prompt_array(group: BatchGroup) -> Tokens:
    """The group's prompt, [tokens] int32."""
    return np.frombuffer(group.prompt_tokens, "<i4")


def place_of(record: Trajectory) -> tuple[int, ResponsePlace]:
    """A trajectory and its place, as `read` takes them. Every stored trajectory has a place."""
    assert record.place is not None
    return record.trajectory_id, record.place


def wholes(run_dir: Path, groups: Sequence[BatchGroup], late: float = LATE_SECONDS) -> list[Whole]:
    """Group by group, of the payload files of `run_dir`. Raises LaminarError as `read`."""
    records = [(record, prompt_array(group)) for group in groups for record in group.trajectories]
    responses = read(run_dir, [place_of(record) for record, _ in records], late)
    return [Whole(*of, response) for of, response in zip(records, responses, strict=True)]
