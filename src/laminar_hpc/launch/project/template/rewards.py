"""The reward: what a response is worth. `conf/experiment/mine.yaml` names it as rewards.score.

It is called once for every response, in worker processes and with a time limit (reward.timeout_seconds). It
may be `async`. By hand:

    python -c 'import rewards; print(rewards.score(prompt="12+79=", response=">91", row={"answer": "91"}))'
"""


def score(*, prompt: str, response: str, row: dict) -> dict[str, float]:
    """A sum with its working, as a teacher marks it: half for the right answer, all of it if every digit was
    worked out.

    `prompt` is what the model saw ("12+79="), `response` what it wrote ("2+9+0=11;1+7+1=091;>91"), `row` the
    line of the data file. "reward" is trained on. "accuracy" is what evaluations report. Other names are
    yours: each gets its own curve.
    """
    working, _, answer = response.rpartition(">")
    right = float(answer == str(row["answer"]))  # data files have answers as texts or numbers
    worked_out = float(working.count(";") == len(prompt.split("+")[0]))
    return {"reward": right * (1 + worked_out) / 2, "accuracy": right, "worked_out": worked_out}
