"""The rewards of a rollout rank, computed in worker processes, so that nothing a reward function does can
stop a rollout.

    score(response)
      one call per reward
        plain    Crew: a process to itself, ended at its time limit
        async    SharedCrew: many on one loop; if that is lost, again in a process to itself
      the sum of weight x reward

A rollout worker owns one RewardPool and awaits `score` per trajectory, with up to reward.slots calls in
flight. A call that raises, hangs or returns something else than a reward counts as reward.score_on_failure,
with the reason. A call whose process died is done again, once.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laminar_hpc.config.rewards import SINGLE, label, reward_functions
from laminar_hpc.config.schema import RewardConfig, RewardFunction
from laminar_hpc.environments.workers.crews import WorkerPool
from laminar_hpc.environments.workers.fork_server import ForkServer, WorkerLost
from laminar_hpc.environments.workers.protocol import Call, CallResult, Spec, WorkerSetup


@dataclass(frozen=True)
class Score:
    """The reward of a trajectory. `error`: "" or what went wrong; times are seconds since the epoch."""

    reward: float
    parts: dict[str, float]
    error: str
    t0: float
    t1: float


class RewardPool(WorkerPool):
    """`prompt_field`: data.prompt_field, for functions that want messages. `quiet`: drops their output."""

    def __init__(self, config: RewardConfig, prompt_field: str = "prompt", quiet: bool = False) -> None:
        self.config = config
        self.entries = reward_functions(config)
        specs = [
            Spec(n, label(n, e), e.function, e.url, e.style, e.api_key_env) for n, e in self.entries.items()
        ]
        self._wants_tokens = any(entry.style == "trl" for entry in self.entries.values())
        server = ForkServer(WorkerSetup(specs, config.timeout_seconds, prompt_field), quiet)
        super().__init__(server, config.workers, config.slots, config.timeout_seconds)
        self._free = asyncio.Semaphore(config.slots)

    async def start(self) -> None:
        """Raises LaminarError when a function is missing, cannot be imported, or has other parameters."""
        if self.entries:  # else the environment has the reward
            await super().start()

    async def score(self, prompt: str, response: str, row: dict, tokens: Sequence[int] = ()) -> Score:
        """The reward of one response. Raises LaminarError only when no worker can be started any more."""
        return combined(
            self.entries, await self.call_each(prompt, response, row, tokens), self.config.score_on_failure
        )

    async def call_each(
        self, prompt: str, response: str, row: dict, tokens: Sequence[int] = ()
    ) -> dict[str, CallResult]:
        """What became of the call of each reward, by name."""
        given = list(tokens) if self._wants_tokens else []
        calls = [Call(next(self._ids), name, prompt, response, row, given) for name in self.entries]
        one = len(calls) == 1
        results = [await self._call(calls[0])] if one else await asyncio.gather(*map(self._call, calls))
        return dict(zip(self.entries, results, strict=True))

    async def _call(self, call: Call) -> CallResult:
        async with self._free:
            t0 = time.time()
            for crew in (self._crew_of(call), self._crew):
                try:
                    return await crew.run(call)
                except WorkerLost:
                    continue
        return CallResult(call.id, 0.0, {}, t0, time.time(), "its process died, twice", "died")


def combined(
    entries: Mapping[str, RewardFunction], results: Mapping[str, CallResult], on_failure: float
) -> Score:
    """The weighted sum. Where there are several, each one's reward is a part by its name, and its parts are
    `name.part`.

    A call that failed counts as `on_failure`; one that says that it does not apply counts as nothing.
    """
    several = SINGLE not in entries
    total, parts, errors, applied = 0.0, {}, [], False
    for name, entry in entries.items():
        got = results[name]
        if got.error:
            errors.append(f"{name}: {got.error}" if several else got.error)
        reward = on_failure if got.error else got.reward
        if reward is not None:
            total += entry.weight * reward
            applied = True
        if several and not got.error and got.reward is not None:
            parts[name] = got.reward
        parts |= {f"{name}.{key}" if several else key: value for key, value in got.parts.items()}
    if not applied:
        total, errors = on_failure, ["no reward function applies to it: all returned None"]
    if several and "accuracy" not in entries:
        accuracy = [got.parts["accuracy"] for got in results.values() if "accuracy" in got.parts]
        parts |= {"accuracy": accuracy[0]} if accuracy else {}
    t0, t1 = min(got.t0 for got in results.values()), max(got.t1 for got in results.values())
    return Score(total, parts, "; ".join(errors), t0, t1)
