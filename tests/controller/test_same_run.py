"""What a run keeps when it goes on: its model, its batches, the prompts of its groups in progress."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.emulated.launch import prepare
from helpers.made import trajectory
from laminar_hpc.config.errors import Refused
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.run import run
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.launch.supervisor import nothing_to_start
from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.policies.admission import quota
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.report.ending import finish
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.store.same_run import check_same_prompts, refuse_changes
from laminar_hpc.store.store import Store

PROMPTS = [Prompt(f"{i}+1=", [i, 7], {"n": i}) for i in range(5)]


def test_groups_in_progress_keep_their_prompts(tmp_path):
    """Promise: other rows are refused in one line as long as a group in progress, or one whose response is
    not scored, was granted for an earlier one; rows behind them may come, and finished groups need none."""
    store = Store(tmp_path)
    tracker = TrajectoryTracker(store, PROMPTS, GroupSize(1, 1, 1), lambda draw: draw)
    tracker.recover()
    groups = tracker.draw(3, 3, replica=0, weight_id=0, weight_step=0, now=0.0)
    for group in groups[1:]:
        tracker.generated(trajectory(group, group.samples[0]), 0)
    done = groups[1].samples[0]
    tracker.scored(done.trajectory_id, done.attempt, 1.0, {}, "", 3.0)
    store.commit()
    store.close()
    path = tmp_path / "store.sqlite"
    other = Prompt("9+9=", [9, 9], {})
    check_same_prompts(path, PROMPTS)
    check_same_prompts(path, [*PROMPTS, other])
    check_same_prompts(path, [PROMPTS[0], other, PROMPTS[2]])  # that of the finished one
    with pytest.raises(
        Refused, match=r"data.train: prompt 1 of 5 is another one than when group 0 was granted"
    ):
        check_same_prompts(path, PROMPTS[::-1])
    with pytest.raises(Refused, match=r"prompt 3 of 2 is missing, which was there when group 2 was granted"):
        check_same_prompts(path, PROMPTS[:2])


def test_a_refused_resume_changes_nothing(tmp_path):
    """A controller that finds other prompts leaves the run's config.yaml and address as they were."""
    config = prepare(tmp_path, prompts=4, prompt_tokens=4, max_response_tokens=8)
    config.resume, config.algorithm.prompts_per_step = "auto", 2
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    with closing(Store(run_dir)) as store:
        tracker = TrajectoryTracker(store, PROMPTS, GroupSize(1, 1, 1), lambda draw: draw)
        tracker.recover()
        tracker.draw(2, 2, replica=0, weight_id=0, weight_step=0, now=0.0)
        store.commit()
    before = dump_config(config)
    (run_dir / "config.yaml").write_text(before)
    config.sampling.temperature = 0.5
    with pytest.raises(Refused, match=r"prompt 1 of 4 is another one than when group 0 was granted"):
        run(config, 1, "here", lambda text: None, lambda: None, finish)
    assert (run_dir / "config.yaml").read_text() == before
    assert not (run_dir / ADDRESS_FILE).exists()


def test_a_run_that_begins_has_none(tmp_path):
    """Without a store, or with an empty one, there is nothing to compare."""
    check_same_prompts(tmp_path / "store.sqlite", PROMPTS)
    Store(tmp_path).close()
    check_same_prompts(tmp_path / "store.sqlite", PROMPTS)


def test_a_run_goes_on_with_its_own_model(tmp_path):
    """Promise: resume=auto with a model of another shape, in another dtype, or with batches of another size
    is refused before anything starts, and says what the run has; all else may change."""
    hf, other = tmp_path / "run/checkpoints/step_000002/hf", tmp_path / "other"
    shape = {"model_type": "qwen2", "hidden_size": 64, "torch_dtype": "float32"}
    for folder, layers in ((hf, 2), (other, 3)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": layers}))
    (hf.parent / "state.json").write_text("{}")
    config = RunConfig(run_dir=str(tmp_path / "run"), resume="auto", source=f"replay:{tmp_path}", steps=9)
    config.checkpoint.unsigned = True
    (tmp_path / "run/config.yaml").write_text(dump_config(config))
    (tmp_path / "run/metrics.jsonl").write_text('{"kind":"step","time":1.0,"step":1}\n')
    wrong = {
        "model.path": (str(other), r"layers 3, not 2\) is another model than that of the run in"),
        "model.dtype": ("bfloat16", "model.dtype=bfloat16 is not the float32 of the run in"),
        "algorithm.prompts_per_step": (16, "prompts_per_step=16: the run in .* counts by 32: leave it"),
    }
    config.model.path, config.algorithm.minibatches_per_step = str(hf), 4
    for key, (value, text) in wrong.items():
        section, _, name = key.partition(".")
        own = getattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
        with pytest.raises(Refused, match=text):
            nothing_to_start(config)
        setattr(getattr(config, section), name, own)
    assert not nothing_to_start(config)
    config.resume, config.algorithm.prompts_per_step = "never", 16
    refuse_changes(config)


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (
            (None, 8),
            (None, 4),
            "samples_per_prompt=4, first_samples=null: groups of 8 to 8 samples of the run in .* may wait",
        ),
        ((None, 8), (None, 16), "samples_per_prompt=16, first_samples=null: groups of 8 to 8 samples"),
        ((4, 8), (6, 8), "samples_per_prompt=8, first_samples=6: groups of 4 to 8 samples"),
        ((None, 8), (4, 16), ""),
        ((4, 8), (2, 8), ""),
    ],
)
def test_groups_that_wait_are_of_a_size_that_is_trained(before, after, refused, tmp_path):
    """The trainers refuse groups of other sizes than their configuration has (trainer/step/learner.py
    `_group_sizes`): then a run that goes on would end at its first step, at every start."""
    config = RunConfig(run_dir=str(tmp_path), resume="auto")
    config.algorithm.first_samples, config.algorithm.samples_per_prompt = before
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "metrics.jsonl").write_text('{"kind":"step","time":1.0,"step":1}\n')
    config.algorithm.first_samples, config.algorithm.samples_per_prompt = after
    if not refused:
        return refuse_changes(config)
    with pytest.raises(Refused, match=refused):
        refuse_changes(config)


def test_a_replay_is_at_the_temperature_of_its_source(tmp_path):
    """Promise: no ratio of log-probs at two temperatures; a store without its run's config.yaml is taken."""
    config = RunConfig(run_dir=str(tmp_path / "run"), source=f"replay:{tmp_path}")
    refuse_changes(config)
    recorded = RunConfig()
    recorded.sampling.temperature = 0.7
    (tmp_path / "config.yaml").write_text(dump_config(recorded))
    with pytest.raises(Refused, match=r"temperature=1.0: the responses of replay:.* were drawn at 0.7; set"):
        refuse_changes(config)
    config.sampling.temperature = 0.7
    refuse_changes(config)


def test_admission_does_not_survive_batches_of_another_size():
    """Why they are refused: 224 groups were granted in 5 steps of 32. By 16 none is granted for seven steps
    more; by 64 a replica is granted 288 at once, of which 3 x 64 can be trained within the bound."""
    assert quota(weight_step=5, counted=224, groups_per_step=16, steps=99, max_staleness=2) == 0
    assert quota(weight_step=11, counted=224, groups_per_step=16, steps=99, max_staleness=2) == 0
    assert quota(weight_step=5, counted=224, groups_per_step=64, steps=99, max_staleness=2) == 288


def test_a_run_keeps_its_adapter(tmp_path):
    """Promise: rank, alpha, targets, dtype and the model below stay, or the start is refused in one line: the
    checkpoint's optimizer would not fit, or belong to another policy. So is a start with an adapter of a run
    that trains the whole model, and one without it."""
    run_dir, model = tmp_path / "run", tmp_path / "model"
    model.mkdir()
    config = RunConfig(run_dir=str(run_dir), resume="auto")
    config.model.path, config.model.lora.rank = str(model), 16
    folder = checkpoint_path(run_dir, 4) / "hf"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder.parent / "state.json").write_text("{}")
    (run_dir / "config.yaml").write_text(dump_config(config))
    refuse_changes(config)
    own = replace(config.model), replace(config.model.lora)
    for key, value, text in (
        (
            "rank",
            8,
            r"model.lora.rank=8: the run in \S+ has 16: set the run's own, or begin another run with",
        ),
        ("rank", 0, r"model.lora.rank=0: the run in .* as model.lora.path"),
        ("alpha", 4.0, "model.lora.alpha=4.0: the run in"),
        ("targets", "mlp", "model.lora.targets=mlp: the run in"),
    ):
        config.model.lora = replace(own[1], **{key: value})
        with pytest.raises(Refused, match=text):
            refuse_changes(config)
    config.model = replace(own[0], path=str(tmp_path), lora=own[1])
    with pytest.raises(Refused, match=r"model.path=\S+: the run in \S+ has \S+/model: set the run's own"):
        refuse_changes(config)
    config.model = replace(own[0], dtype="bfloat16", lora=own[1])
    with pytest.raises(Refused, match=r"model.dtype=bfloat16: the run in"):
        refuse_changes(config)
    (folder / "adapter_config.json").unlink()
    whole = replace(config, model=replace(own[0], lora=replace(own[1], rank=0)))
    (run_dir / "config.yaml").write_text(dump_config(whole))
    config.model = own[0]
    with pytest.raises(Refused, match=r"model.lora.rank=16: the run in .* has 0: .* hf/ as model.path"):
        refuse_changes(config)
