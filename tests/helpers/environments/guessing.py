"""An environment as v0 of verifiers has them, whose rows say what becomes of it. Copied into the folder of a
test."""

import asyncio
import json
import os
import subprocess
from pathlib import Path


def load_environment(words: int = 3, turns: int = 9) -> "Guessing":
    if words < 0:
        raise ValueError("fewer than none")
    return Guessing(words, turns)


STRANGE = {"nan": float("nan"), "much": 1e300, "none": None, "text": "good"}


class Guessing:
    def __init__(self, words: int, turns: int) -> None:
        self._words, self._turns = words, turns
        Path("environment.json").write_text(json.dumps(dict(os.environ)))

    def get_dataset(self, n: int = -1) -> list[dict]:
        kept = self._words if n < 0 else min(n, self._words)
        return [{"prompt": [{"role": "user", "content": f"guess {i}"}], "word": f"w{i}"} for i in range(kept)]

    async def run_rollout(self, row: dict, client: object, model: str, sampling_args: dict) -> dict:
        messages = list(row["prompt"])
        while len(messages) < 2 * row.get("turns", self._turns):
            create = client.client.chat.completions.create  # type: ignore[attr-defined]
            answer = await create(model=model, messages=messages)
            said = answer.choices[0].message.content
            if said == "raise":
                return {"error": "UnluckyError: it is over", "reward": 0.0}
            if said in STRANGE:
                return {"reward": STRANGE[said], "metrics": {}}
            if said == "half":
                raise ValueError(chr(0xD800))
            if said == "die":
                os._exit(3)
            if said == "hang":
                await asyncio.Event().wait()
            if said == "leave":
                left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                Path("left").write_text(str(left.pid))
            messages += [{"role": "assistant", "content": said}]
            if said == row["word"]:
                break
            messages += [{"role": "user", "content": "no"}]
        return {"reward": float(said == row["word"]), "metrics": {"guesses": len(messages) // 2, "text": "x"}}
