"""docs/environments.md: a request of an agent that is refused is not lost in the reward that it returns."""

from pathlib import Path

from helpers.control.script import scripted
from helpers.made import trajectory
from laminar_hpc.line.messages.rollouts import Generated, Scored
from laminar_hpc.machine.files import jsonl


def test_the_first_refused_request_is_said_once(tmp_path: Path) -> None:
    """On the console and in metrics.jsonl, with its reason; such trajectories are graded as others."""
    said = list[str]()
    script = scripted(tmp_path, replicas=1, prompts=16, say=said.append)
    (grant,) = script.working(1)
    samples = [(group, sample) for group in grant.groups for sample in group.samples]
    for reason, (group, sample) in zip(("", "n: one answer", "stop: none"), samples, strict=False):
        number, attempt = sample.trajectory_id, sample.attempt
        script.hear("rollout", 0, Generated(trajectory(group, sample)))
        script.hear("rollout", 0, Scored(number, attempt, 0.0, {}, "", 1.0, refused=reason))
        assert not script.scoring(0)
    first = samples[1][1].trajectory_id
    text = f"a request was refused, the first one in trajectory {first}: n: one answer"
    assert [line.split(None, 1) for line in said if line.startswith("agent")] == [["agent", text]]
    [record] = jsonl.read(script.run_dir / "metrics.jsonl", "refused")
    assert (record["trajectory_id"], record["text"]) == (first, "n: one answer")
    script.closes()
