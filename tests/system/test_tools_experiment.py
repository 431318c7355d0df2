"""`experiment=tools` as a user starts it: a small model learns to call a calculator over several turns."""

from pathlib import Path

import pytest
import torch

from helpers.engines.pair import hf_logprobs, reference
from helpers.runs import Run, metrics, summary
from laminar_hpc.config.directories import examples_directory
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.report import rundata
from laminar_hpc.store.payload.whole import Whole

pytestmark = pytest.mark.slow
SECONDS = 1500  # of a run, on a machine that others use too
RESCORED = 16  # trajectories per step whose weights are kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment as it is shipped, with its weights kept half-way; and the same without the tool."""
    folder = tmp_path_factory.mktemp("tools")
    for name, words in (("tools", ["checkpoint.every=20"]), ("alone", ["environment.tools=[]"])):
        run = Run(folder / name, *words, short=False, experiment="experiment=tools")
        assert run.finish(SECONDS) == 0, run.lines
    return folder


@pytest.mark.timeout(2 * SECONDS + 100)
def test_it_learns_what_it_cannot_without_the_tool(folder: Path) -> None:
    """Held-out accuracy, greedy: at least 0.4 above the same model trained as long without the tool, and
    above where it began; each trajectory has one policy and is one sample."""
    found, alone = summary(folder / "tools"), summary(folder / "alone")
    for name, of in (("tools", found), ("alone", alone)):
        print(name, of["accuracy_before"], of["accuracy_after"], of["wall_seconds"], of["environment"])
    best_alone = max(alone["accuracy_before"], alone["accuracy_after"])
    assert found["accuracy_after"] >= best_alone + 0.4
    assert found["accuracy_after"] >= found["accuracy_before"] + 0.4
    assert found["max_versions_per_trajectory"] == 1 and alone["environment"] is None
    last = metrics(folder / "tools", "step")[-1]
    assert last["turns_mean"] > 2.5 and last["cached_share_mean"] > 0.9
    samples = sum(step["trajectories"] for step in metrics(folder / "tools", "step"))
    ids = {whole.record.trajectory_id for whole in trajectories(folder / "tools")}
    assert samples / len(ids) == 1.0 and len(ids) == found["trajectories_trained"]


@pytest.mark.timeout(2 * SECONDS + 100)
def test_what_is_stored_is_what_the_engine_saw(folder: Path) -> None:
    """Re-scored by transformers from the stored prompt and tokens, with the weights of their step, the
    log-probs of all that was drawn are the engine's; what was given has none. So the ids are those that the
    engine saw, those of the calculator's answers included."""
    decoder, several, gap = TextDecoder(Path(examples_directory("calculator/base"))), 0, 0.0
    kept = folder / "tools/checkpoints/step_000020/hf"
    for step, model_path in ((0, Path(examples_directory("calculator/base"))), (20, kept)):
        model = reference(model_path)
        chosen = sorted(trajectories(folder / "tools", step), key=lambda w: -turns_of(w))[:RESCORED]
        assert len(chosen) == RESCORED
        for whole in chosen:
            response, mask = whole.response, whole.response.loss_mask
            expected = hf_logprobs(model, whole.prompt.tolist(), response.tokens.tolist())
            of_drawn = (torch.tensor(response.logprobs) - expected)[torch.tensor(mask)]
            gap = max(gap, float(of_drawn.abs().max()))
            assert not response.logprobs[~mask].any()
            assert {span.weight_id for span in response.spans} == {whole.record.weight_id}
            given = decoder.text(response.tokens[~mask].tolist(), specials=True)
            assert given.count("<|im_start|>tool\n") >= turns_of(whole) - 1
            several += turns_of(whole) > 1
    print(f"largest gap {gap:.1e}, {several} trajectories of several turns")
    assert gap < 1e-3 and several >= RESCORED


@pytest.mark.timeout(2 * SECONDS + 100)
def test_the_report_shows_the_turns(folder: Path) -> None:
    """Each turn of the sample trajectories with its call, its seconds and its loss mask; the section on turns
    with the failures by class."""
    page = (folder / "tools/report.html").read_text()
    for words in ("Turns and tools", "failures by class", "loss mask", "<td>calculate</td>", "generate 0."):
        assert words in page, words
    assert "Turns and tools" not in (folder / "alone/report.html").read_text()


def turns_of(whole: Whole) -> int:
    """Stretches that the model has drawn."""
    return len(whole.response.mask_runs[::2])


def trajectories(run_dir: Path, weight_step: int | None = None) -> list[Whole]:
    """Those that were trained, wherever their responses are; of the weights of one step."""
    run = rundata.load(run_dir)
    return run.wholes([t.id for t in run.consumed if weight_step in (None, t.weight_step)])
