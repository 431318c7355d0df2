"""The order of prompts: a pure function of seed and count, so that a resumed run goes on where it was. No prompt twice in a pass."""

import random
from functools import lru_cache


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, number_of_pass: int, shuffle: bool) -> list[int]:
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}:{number_of_pass}").shuffle(order)
    return order


def prompt_index(draw: int, rows: int, seed: int, shuffle: bool) -> int:
    """Row of the `draw`-th prompt of the run (from 0) in a file of `rows` rows."""
    number_of_pass, position = divmod(draw, rows)
    return _order(rows, seed, number_of_pass, shuffle)[position]
