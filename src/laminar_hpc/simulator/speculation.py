"""Speculative decoding in the simulator: a decode step that verifies guesses, taken at the batch sizes at
which it brings more tokens per second than a plain one, as `rollout.speculation=auto` takes it.

A step that verifies reads the weights once and computes 1 + DRAFTED tokens a request, so it is nearly free
where reading the weights takes longest, and costs 1 + DRAFTED times as much where computing does.
"""

from dataclasses import asdict, dataclass, field

from laminar_hpc.simulator.cost import EngineCosts

# guesses of a step: the best of those tried for an 8B model's rollouts (NeMo-RL, arXiv 2604.26779)
DRAFTED = 3
# Tokens that a step brings a request, the drawn one included. BubbleSpec (arXiv 2605.08862), whose drafts are
# other responses' texts, halves the decoding steps; an EAGLE-3 head brings 2.05 to 2.47 (arXiv 2604.26779).
TOKENS_PER_STEP = 2.0


@dataclass(frozen=True, slots=True)
class SpeculatingCosts(EngineCosts):
    """Seconds per token of each request: those of a step that verifies are divided by `tokens_per_step`. The
    KV of all requests, which such a step reads once too, still counts once a token: the gain at long contexts
    is rather too small."""

    drafted: int = field(default=DRAFTED, metadata={"time": False})
    tokens_per_step: float = field(default=TOKENS_PER_STEP, metadata={"time": False})

    def at(self, requests: int) -> float:
        verifying = EngineCosts.at(self, requests * (1 + self.drafted)) / self.tokens_per_step
        return min(EngineCosts.at(self, requests), verifying)


def speculating(costs: EngineCosts) -> EngineCosts:
    """The same engine with guesses."""
    return SpeculatingCosts(**asdict(costs))
