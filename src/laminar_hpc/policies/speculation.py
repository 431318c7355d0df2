"""When drafts pay: whether the next decoding step of an engine verifies drafts or makes one token a request.

A step that verifies takes longer and may bring several tokens a request, so what counts is tokens per second,
which depends on how many requests run. Both kinds of step are measured, apart for each power of two of
requests, and the better one is taken; the other is looked at again now and then, as texts and loads change.

Invariant: while verifying is the slower kind at some number of requests, at most one step in `pause` verifies
there, and `pause` doubles with each look that confirms it, up to PAUSE_MAX; nor do these looks take more than
a share of LOST of the time. Above FIRST requests nothing is
tried unless verifying is better by MARGIN at half as many, so a full engine pays nothing where a small one
says that it cannot pay.
"""

from collections import defaultdict
from dataclasses import dataclass, field

FIRST = 8  # requests up to which verifying is tried without evidence
MARGIN = 1.1  # more tokens per second at half as many requests, before it is tried at more
TRIALS = 4  # steps of each kind before they are compared ...
HOPELESS = 0.7  # ... but one that verifies is enough where it brings less than this share of a plain one's
LOST = 0.01  # of the time, for looks at whether verifying pays by now
WEIGHT = 0.1  # of the newest step in an average: about the last 20 count
PAUSE_MIN, PAUSE_MAX = 16, 512  # steps between two looks at the slower kind


@dataclass
class StepAverage:
    """Of one kind of step: seconds, and tokens per request, averaged over the latest ones."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        self.steps += 1
        weight = max(WEIGHT, 1 / self.steps)
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (tokens - self.tokens)

    @property
    def rate(self) -> float:
        """Tokens per second of one request."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class StepKinds:
    """Both kinds at one power of two of requests."""

    plain: StepAverage = field(default_factory=StepAverage)
    verifying: StepAverage = field(default_factory=StepAverage)
    since: int = 0  # steps since the last look at the slower kind
    pause: int = PAUSE_MIN

    @property
    def known(self) -> bool:
        enough = self.verifying.steps >= TRIALS or (self.verifying.steps > 0 and self.gain < HOPELESS)
        return self.plain.steps >= TRIALS and enough

    @property
    def rest(self) -> float:
        """Steps between two looks at the slower kind. One that verifies in vain takes the time of so many
        plain steps, less what it brings."""
        if self.gain > 1.0 or not self.plain.seconds:
            return self.pause
        return max(self.pause, (self.verifying.seconds / self.plain.seconds - self.verifying.tokens) / LOST)

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without."""
        return self.verifying.rate / self.plain.rate if self.plain.rate else 0.0


class SpeculationGate:
    """One engine's. `verifies` before each step, `record` after it."""

    def __init__(self) -> None:
        self.kinds: defaultdict[int, StepKinds] = defaultdict(StepKinds)

    def verifies(self, requests: int) -> bool:
        """Whether the next step, of so many requests, is to verify drafts."""
        kinds = self._at(requests)
        if requests > FIRST:
            half = self._at((requests + 1) // 2)
            if not half.known or half.gain < MARGIN:
                return False
        if not kinds.known:
            return kinds.plain.steps >= TRIALS
        better = kinds.gain > 1.0
        kinds.since += 1
        if kinds.since < kinds.rest:
            return better
        kinds.since = 0
        return not better

    def record(self, requests: int, verified: bool, seconds: float, tokens: float) -> None:
        """A step of `requests` requests took `seconds` and brought `tokens` a request on average."""
        kinds = self._at(requests)
        was_known, was_better = kinds.known, kinds.gain > 1.0
        (kinds.verifying if verified else kinds.plain).add(seconds, tokens)
        if was_known and verified != was_better:  # a look at the slower kind
            changed = (kinds.gain > 1.0) != was_better
            kinds.pause = PAUSE_MIN if changed else min(2 * kinds.pause, PAUSE_MAX)

    def _at(self, requests: int) -> StepKinds:
        return self.kinds[(requests - 1).bit_length()]
