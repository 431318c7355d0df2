"""Whether a run that goes on still has the prompts that its groups in progress were granted for.

A group is known by the number of its prompt. With other data, or other rows left out, its samples would be
generated for one prompt and scored by the row of another, without a sign.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.controller.read_only import connect_read_only
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.payload.layout import tokens_array


def check_same_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Raises Refused if a group in progress in the store at `path` has another prompt than `prompts` says.
    Prompts behind those may have come or gone. Without prompts, in a replay, there is nothing to compare."""
    if not prompts or not path.is_file() or path.stat().st_size == 0:
        return
    text = "SELECT id, prompt_index, tokens FROM groups JOIN prompts ON group_id = id WHERE state = 'granted'"
    try:
        with closing(connect_read_only(path)) as db:
            granted = db.execute(text).fetchall()
    except sqlite3.Error:  # of another version, which is refused where it is opened
        return
    for group_id, index, tokens in granted:
        if index < len(prompts) and tokens_array(prompts[index].tokens).tobytes() == tokens:
            continue
        what = "is another one than" if index < len(prompts) else "is missing, which was there"
        text = f"data.train: prompt {index + 1} of {len(prompts)} {what} when group {group_id} was granted"
        cure = "go on with the rows, the tokenizer and the data.* settings that the run had"
        raise Refused([f"{text}: {cure}, or begin another run with a checkpoint's hf/ as model.path"])
