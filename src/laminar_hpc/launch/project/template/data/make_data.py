"""Writes train.jsonl and heldout.jsonl beside this file: sums of two numbers with three or four digits. Run
it again after a change.

A line of data is any JSON object. The prompt is its field "prompt" (or the one that data.prompt_field names);
the reward function gets the whole line as `row`.
"""

import json
import random
from pathlib import Path

TRAIN, HELDOUT = 1024, 64


def main() -> None:
    draw = random.Random(0)
    # in the order of drawing, each once: no held-out problem is in the training data
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < TRAIN + HELDOUT:
        digits = draw.choice((3, 4))
        low, high = 10 ** (digits - 1), 10**digits - 1
        pairs[draw.randint(low, high), draw.randint(low, high)] = None
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs]
    folder = Path(__file__).parent
    (folder / "train.jsonl").write_text("".join(rows[:TRAIN]))
    (folder / "heldout.jsonl").write_text("".join(rows[TRAIN:]))


if __name__ == "__main__":
    main()
