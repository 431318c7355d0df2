"""Which prompts go out first: each local batch gets its share of the long ones, and begins with them. Pure;
live system and simulator use it.

Prompts are drawn in the order of policies/sampling.py. A draw whose prompt has finished before begins a
block: it and the draws behind it, as many as the trainer takes in a step, none beyond the end of the pass
over the data. `dealt` puts a block into the order in which it goes out:

    expected tokens, longest first     9 8 7 6 5 4 3 2 1
    dealt to local batches of three    9 4 3 | 8 5 2 | 7 6 1

So replicas finish their local batches at about the same time, and the longest responses, which decide how
long a batch takes, are its first. The order of draws is all that changes: how many may be granted, and on
which weights, is for policies/admission.py to say, whose proof does not mention which prompt a group has.

Invariants.
  - Each draw goes out once, after all draws of earlier blocks and before all of later ones: fewer than
    `block` others go before it that would not in the order of the draws. So nothing starves, and every prompt
    of a pass goes out once before any goes out again.
  - A prompt of which nothing is known goes out in its place: the first pass is that of
    pipeline.dispatch=in_order, for which `block` is 1.
"""

from collections import deque
from collections.abc import Callable, Sequence


class ExpectedLengths:
    """Response tokens that the samples of a prompt can be expected to have: the mean of its group in the last
    pass, else the mean over all prompts that are known. It holds a number for each prompt that is known.

    >>> lengths = ExpectedLengths()
    >>> lengths.finished(3, [100, 300])
    >>> lengths.finished(4, [20, 20])
    >>> lengths.expected_length(3), lengths.expected_length(5)
    (200.0, 110.0)
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._sum = 0.0

    def finished(self, prompt: int, lengths: Sequence[int]) -> None:
        """All samples of a group of this prompt are there, with so many response tokens."""
        mean = sum(lengths) / max(1, len(lengths))
        self._sum += mean - self._means.get(prompt, 0.0)
        self._means[prompt] = mean

    def expected_length(self, prompt: int) -> float:
        """Tokens; between the smallest and the largest mean that was seen, 0.0 before there is any."""
        return self._means.get(prompt, self._sum / max(1, len(self._means)))

    def knows(self, prompt: int) -> bool:
        """A group of this prompt has finished."""
        return prompt in self._means


def dealt(tokens: Sequence[float], batch: int) -> list[int]:
    """The places of `tokens`, in the order in which they go out: as many runs as it takes, of at most `batch`
    each, of nearly equal sums, each from the longest to the shortest. Equals keep their order.

    >>> dealt([5, 9, 1, 7, 3, 8], 2)
    [1, 2, 5, 4, 3, 0]
    """
    order = sorted(range(len(tokens)), key=lambda place: -tokens[place])
    runs = -(-len(order) // batch)
    hands: list[list[int]] = [[] for _ in range(runs)]
    for rank, place in enumerate(order):
        row, at = divmod(rank, runs)
        # to and fro, so that no run has all the longest
        hands[at if row % 2 == 0 else runs - 1 - at].append(place)
    return [place for hand in hands for place in hand]


class DrawOrder:
    """Gives out draws, one after the other. `prompt_of_draw` says which prompt a draw has, of `rows`.

    >>> lengths = ExpectedLengths()
    >>> for prompt in range(4): lengths.finished(prompt, [10 * prompt])
    >>> order = DrawOrder(lengths, lambda draw: draw % 4, rows=4, block=4)
    >>> [order.take(batch=2) for _ in range(3)], order.left, order.next
    ([3, 0, 2], [1], 4)
    """

    def __init__(
        self, lengths: ExpectedLengths, prompt_of_draw: Callable[[int], int], rows: int, block: int
    ) -> None:
        self._lengths = lengths
        self._prompt_of_draw = prompt_of_draw
        self._rows = rows
        self._block = block
        self._left: deque[int] = deque()
        self.next = 0  # the first draw that is in no block yet

    @property
    def left(self) -> list[int]:
        """Draws that are in order and not given out, the next one first."""
        return list(self._left)

    def go_on(self, next_draw: int, left: Sequence[int]) -> None:
        """From where an earlier one was."""
        self.next = next_draw
        self._left = deque(left)

    def put_back(self, draws: Sequence[int]) -> None:
        """They go out before all others."""
        self._left.extendleft(reversed(draws))

    def take(self, batch: int) -> int:
        """The next draw; `batch`: groups of a local batch."""
        if not self._left:
            self._begin_block(batch)
        return self._left.popleft()

    def _begin_block(self, batch: int) -> None:
        first, size = self.next, 1
        if self._block > 1 and self._lengths.knows(self._prompt_of_draw(first)):
            size = min(self._block, self._rows - first % self._rows)
        draws = range(first, first + size)
        self.next += size
        tokens = [self._lengths.expected_length(self._prompt_of_draw(draw)) for draw in draws]
        self._left.extend(draws[place] for place in dealt(tokens, batch))
