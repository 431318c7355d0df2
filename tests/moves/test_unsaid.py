"""What a rollout that was told to end could not say, because there was no controller, counts at the next one,
once; message by message."""

from pathlib import Path

import pytest

from helpers.control.script import Script, samples_of, scripted
from helpers.made import Made, stored
from laminar_hpc.line import unsaid
from laminar_hpc.line.messages.data import Message, Partial, PromptGroup, Sample, VersionSpan
from laminar_hpc.line.messages.membership import Goodbye
from laminar_hpc.line.messages.rollouts import Generated, Increment, Leaving, Scored, Unfinished
from laminar_hpc.line.messages.wire import encode
from laminar_hpc.rollout.partial_response import columns, tokens_of

TOKENS = list(range(20))
IDENTITY = "rollout:0:"  # as script.py names it


def generated(run_dir: Path, group: PromptGroup, sample: Sample) -> Generated:
    whose = sample.trajectory_id, group.group_id, group.prompt_tokens
    response = Made(*whose, list(TOKENS), [-1.0] * len(TOKENS), attempt=sample.attempt)
    return Generated(stored(run_dir, response))


class Ended:
    """A run whose controller has died, and rollout 0 after it: of the first group it had generated and scored
    `done`, and generated and not scored `unscored`; of the second it had `part`."""

    def __init__(self, folder: Path) -> None:
        script = scripted(folder)
        (grant,) = script.working(1)
        self.config = script.controller.config
        self.store_id = script.controller.store.store_id
        self.owned = samples_of(grant)
        self.run_dir = script.run_dir
        first, second, *_ = grant.groups
        self.done, self.unscored = first.samples
        self.part, _ = second.samples
        so_far = Partial(*columns(TOKENS[:7], [-1.0] * 7), [VersionSpan(0, 0, 7)], 1.0)
        told = columns(TOKENS[:3], [-1.0] * 3)
        self.words: list[Message] = [
            Leaving(),
            Increment(self.part.trajectory_id, 0, 0, *told, [VersionSpan(0, 0, 3)], 1.0),
            generated(self.run_dir, first, self.done),
            Scored(self.done.trajectory_id, self.done.attempt, 1.0, {}, "", 3.0),
            generated(self.run_dir, first, self.unscored),
            Unfinished(self.part.trajectory_id, self.part.attempt, so_far),
            Goodbye(),
        ]
        script.closes()

    def leaves(self, first: int = 1, store_id: str = "") -> Path:
        head = unsaid.Head(IDENTITY, 0, store_id or self.store_id, first)
        return unsaid.leave(self.run_dir, head, map(encode, self.words))

    def states(self, script: Script) -> dict[int, str]:
        return {i: state for i, state in script.states().items() if i in self.owned}


def test_the_next_controller_takes_what_was_left(tmp_path: Path) -> None:
    """Responses are stored and need not be generated again, a score counts, and what was not complete goes on
    from its tokens once its replica is known to be gone."""
    ended = Ended(tmp_path)
    path = ended.leaves()
    script = Script(ended.config)
    states = ended.states(script)
    assert states[ended.done.trajectory_id] == "finished"
    assert states[ended.unscored.trajectory_id] == "generated"
    assert not path.exists()
    script.publish(0, 0)
    script.rollout(0, life="next")
    assert ended.unscored.trajectory_id in script.state().unscored, "its scorer is gone"
    part = script.known(ended.part.trajectory_id, ended.part.attempt)
    assert part is not None and tokens_of(part).tolist() == TOKENS[:7] and script.state().discarded == 0
    script.ends_clean()


def test_nothing_is_taken_twice(tmp_path: Path) -> None:
    """The numbers tell what had arrived after all, and a controller that died before it removed the file has
    taken all of it."""
    ended = Ended(tmp_path)
    path = ended.leaves()
    content = path.read_bytes()
    Script(ended.config).closes()
    path.write_bytes(content)
    script = Script(ended.config)
    assert script.state().refused == 0 and not path.exists()
    assert script.controller.store.received()[IDENTITY] == len(ended.words)
    script.ends_clean()


@pytest.mark.parametrize("wrong", ["store", "cut", "garbage"])
def test_what_does_not_belong_here_or_is_damaged_stays(tmp_path: Path, wrong: str) -> None:
    """Nothing of it is taken, and the run goes on without it."""
    ended = Ended(tmp_path)
    path = ended.leaves(store_id="another" if wrong == "store" else "")
    if wrong == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    if wrong == "garbage":
        path.write_bytes(b"nonsense" * 9)
    script = Script(ended.config)
    assert set(ended.states(script).values()) == {"granted"} and path.exists()
    script.closes()
