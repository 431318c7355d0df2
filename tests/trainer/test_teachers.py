"""Teachers on the trainer ranks, and demonstrations beside the trajectories: the weights after an update are
those of plain torch and transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from helpers.made import Made
from helpers.trainer import tiny
from helpers.trainer.plain import selected
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.teachers import check_rows, wrong_teachers
from laminar_hpc.trainer.megatron import head
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.demonstrations import Demonstrations
from laminar_hpc.trainer.step.learner import Learner

END = 7


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models of the untied model's shape."""
    folder = tmp_path_factory.mktemp("teachers")
    return {
        name: str(tiny.make_model(folder / name, seed=seed, tie_word_embeddings=False))
        for name, seed in (("one", 21), ("two", 22))
    }


def teacher_of(t: Made) -> str:
    return "two" if t.group_id % 2 else "one"


def named(batch: list[Made]):
    """As the controller names each prompt's teacher."""
    found = tiny.step_batch(batch)
    planned = [replace(p, teacher=teacher_of(t)) for p, t in zip(found.planned, batch, strict=True)]
    return replace(found, planned=planned)


def advantages_of(batch: list[Made], folders: dict[str, str], rewards: float, coefficient: float):
    """Per trained token, by the formula of trainer/step/teachers.py; and the mean of log policy - log
    teacher."""
    loaded = {name: tiny.transformers_model(Path(folder)) for name, folder in folders.items()}
    of_groups: dict[int, list[float]] = {}
    for t in batch:
        of_groups.setdefault(t.group_id, []).append(t.reward)
    found, gaps = [], []
    for t in batch:
        r = torch.tensor(of_groups[t.group_id])
        relative = (t.reward - r.mean()) / (r.std() + 1e-4)
        with torch.no_grad():
            logprobs = tiny.token_logprobs(loaded[teacher_of(t)], t)[0]
        gap = selected(logprobs - torch.tensor(t.logprobs), t)
        gaps.append(gap)
        found.append(rewards * relative + coefficient * gap)
    return found, -torch.cat(gaps).mean().item()


def plain_loss(
    model: torch.nn.Module, batch: list[Made], advantages: list[torch.Tensor], temperature: float = 1.0
) -> torch.Tensor:
    """DAPO's clip over all trained tokens."""
    total, count = torch.zeros(()), 0
    for t, advantage in zip(batch, advantages, strict=True):
        logprobs = tiny.token_logprobs(model, t, temperature)[0]
        ratio = selected((logprobs - torch.tensor(t.logprobs)).exp(), t)
        total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
        count += len(ratio)
    return total / count


def after_adam(config, model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    c = config.optimizer
    adam = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=0)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_grad)
    adam.step()
    return model.state_dict()


def test_each_prompt_has_the_advantage_of_its_teacher(untied_model: Path, teachers, world: None) -> None:
    config = tiny.make_config(
        untied_model,
        optimizer__lr=1e-3,
        teacher__model=teachers,
        teacher__rewards=0.5,
        teacher__coefficient=0.3,
    )
    batch, model = tiny.make_batch(seed=31), tiny.transformers_model(untied_model)
    advantages, kl = advantages_of(batch, teachers, 0.5, 0.3)
    loss = plain_loss(model, batch, advantages)
    policy = MegatronPolicy(config)
    before = {name: t.clone() for name, t in policy.canonical_tensors()}
    learner = Learner(config, policy)
    held = {name: t.clone() for name, t in policy.canonical_tensors()}
    assert all(torch.equal(before[name], held[name]) for name in before), "the policy keeps its own weights"
    metrics = learner.train(named(batch), 0, lambda: None)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(kl, abs=1e-5) and kl > 0
    expected = after_adam(config, model, loss)
    found = dict(policy.canonical_tensors())
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 2e-6


def plain_divergence(kind: str, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Of rows of probabilities, by the definitions."""
    m = (p + t) / 2
    kl = {
        "reverse": p * (p / t).log(),
        "forward": t * (t / p).log(),
        "jsd": (p * (p / m).log() + t * (t / m).log()) / 2,
    }
    return kl[kind].sum(-1)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_the_divergence_over_the_vocabulary_is_added_to_the_loss(
    kind: str, untied_model: Path, teachers, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two teachers, at a temperature, from logits that come in chunks, beside half of GRPO's
    advantages."""
    monkeypatch.setattr(head, "LOGITS_BYTES", 4 * tiny.VOCAB * 4 * 7)  # seven rows at once, beside a teacher
    config = tiny.make_config(
        untied_model,
        optimizer__lr=1e-3,
        sampling__temperature=0.7,
        teacher__model=teachers,
        teacher__rewards=0.5,
        teacher__coefficient=0.3,
        teacher__divergence=kind,
    )
    batch, model = tiny.make_batch(seed=31), tiny.transformers_model(untied_model)
    loaded = {name: tiny.transformers_model(Path(folder)) for name, folder in teachers.items()}

    def probabilities(model: torch.nn.Module, t: Made) -> torch.Tensor:
        tokens = torch.tensor([t.prompt_tokens + t.response_tokens])
        logits = model(tokens).logits[0, len(t.prompt_tokens) - 1 : -1] / 0.7
        return logits.softmax(-1)[torch.tensor(t.loss_mask, dtype=torch.bool)]

    divergences = torch.cat(
        [
            plain_divergence(kind, probabilities(model, t), probabilities(loaded[teacher_of(t)], t).detach())
            for t in batch
        ]
    )
    rewarded, _ = advantages_of(batch, teachers, 0.5, 0.0)
    loss = plain_loss(model, batch, rewarded, 0.7) + 0.3 * divergences.mean()
    policy = MegatronPolicy(config)
    metrics = Learner(config, policy).train(named(batch), 0, lambda: None)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(divergences.mean().item(), abs=1e-5) and loss.item() != 0
    expected = after_adam(config, model, loss)
    found = dict(policy.canonical_tensors())
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 2e-6


@pytest.mark.parametrize("tensor", [1, 2])
def test_divergences_have_the_gradient_of_plain_softmax(tensor: int, ranks: Ranks) -> None:
    """Of both heads of two teachers, to 1e-6, also over a vocabulary split over two ranks with padding."""
    for found in ranks.run(tensor, "cases:divergence_gradients"):
        assert found.pop("largest") > 0.1
        assert {name for name, value in found.items() if value > 1e-6} == set(), found


def test_two_ranks_ask_the_teacher_as_one_does(untied_model: Path, teachers, ranks: Ranks) -> None:
    settings = {
        "optimizer__lr": 1e-3,
        "teacher__model": teachers["one"],
        "algorithm__minibatches_per_step": 2,
    }
    runs = [
        ranks.run(world, "cases:steps", model=str(untied_model), settings={**settings, **layout}, count=2)
        for world, layout in ((1, {}), (2, {"trainer__data_parallel": 2}))
    ]
    (alone,), (first, _) = runs
    kls = [[m["teacher_kl"] for m in of["metrics"]] for of in (alone, first)]
    assert kls[0] == pytest.approx(kls[1], abs=1e-6) and min(kls[0]) > 0
    assert max(abs(alone["weights"][n] - first["weights"][n]).max() for n in first["weights"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["sampled", "reverse"])
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}],
    ids=["tensor", "pipeline", "context"],
)
def test_layouts_hold_teachers(
    layout: dict, divergence: str, untied_model: Path, teachers, ranks: Ranks
) -> None:
    settings = {
        "optimizer__lr": 1e-3,
        "teacher__model": teachers["one"],
        "teacher__divergence": divergence,
    }
    split = {f"trainer__{key}": value for key, value in layout.items()}
    (alone,) = ranks.run(1, "cases:steps", model=str(untied_model), settings=settings, count=2)
    first, _ = ranks.run(2, "cases:steps", model=str(untied_model), settings={**settings, **split}, count=2)
    assert max(abs(alone["weights"][n] - first["weights"][n]).max() for n in first["weights"]) < 1e-6


# ---- demonstrations ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are the words w0 to w49, of which one ends a response."""
    folder = tiny.make_model(tmp_path_factory.mktemp("words"), seed=1, tie_word_embeddings=False)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": END}))
    return folder


def rows_file(folder: Path, rows: list[dict]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


ROWS = [
    {"prompt": f"w{i} w{i + 1}", "response": " ".join(f"w{i + j}" for j in range(i % 4 + 1))}
    for i in range(9, 14)
]


@pytest.mark.parametrize("aggregation", ["tokens", "sequences"])
def test_demonstrations_are_a_mean_of_their_own(
    aggregation: str, with_words: Path, tmp_path: Path, world: None
) -> None:
    """Their likelihood is added to the loss of the trajectories, whose numbers they leave as they are."""
    shown = {
        "demonstrations__path": rows_file(tmp_path, ROWS),
        "demonstrations__per_update": 4,
        "demonstrations__coefficient": 0.4,
        "trainer__tokens_per_microbatch": 40,
    }
    common = {"optimizer__lr": 1e-3, "algorithm__loss_aggregation": aggregation}
    batch, found, metrics = tiny.make_batch(seed=33), [], []
    for settings in (common, {**common, **shown}):
        policy = MegatronPolicy(tiny.make_config(with_words, **settings))
        metrics.append(Learner(policy.config, policy).train(tiny.step_batch(batch), 0, lambda: None))
        found.append({name: t.clone() for name, t in policy.canonical_tensors()})
    same = ("loss", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "response_tokens")
    assert all(metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-6) for name in same)

    config = tiny.make_config(with_words, **common, **shown)
    chosen = Demonstrations(config, 1e9).of_update(0, 0, [1]).texts
    assert len({tuple(text.prompt) for text in chosen}) == 4, "no row comes twice in a pass"
    model = tiny.transformers_model(with_words)
    loss = grpo_loss(model, batch, aggregation) + 0.4 * likelihood_loss(model, chosen)
    assert metrics[1]["demonstration_loss"] == pytest.approx(likelihood_loss(model, chosen).item(), abs=1e-5)
    expected = after_adam(config, model, loss)
    assert max((found[1][name] - expected[name]).abs().max().item() for name in expected) < 3e-6


def grpo_loss(model: torch.nn.Module, batch: list[Made], aggregation: str) -> torch.Tensor:
    config = tiny.make_config(Path())
    if aggregation == "tokens":
        return tiny.reference_loss(model, batch, config)
    rewards: dict[int, list[float]] = {}
    for t in batch:
        rewards.setdefault(t.group_id, []).append(t.reward)
    means = []
    for t in batch:
        r = torch.tensor(rewards[t.group_id])
        advantage = (t.reward - r.mean()) / (r.std() + 1e-4)
        ratio = selected((tiny.token_logprobs(model, t)[0] - torch.tensor(t.logprobs)).exp(), t)
        means.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).mean())
    return torch.stack(means).mean()


def likelihood_loss(model: torch.nn.Module, texts: list) -> torch.Tensor:
    found = []
    for text in texts:
        answer = text.response.tokens.tolist()
        assert answer[-1] == END
        tokens = torch.tensor([text.prompt.tolist() + answer])
        logp = model(tokens).logits[0, len(text.prompt) - 1 : -1].log_softmax(-1)
        found.append(logp.gather(1, tokens[0, len(text.prompt) :, None])[:, 0])
    return -torch.cat(found).mean()


def test_a_pass_over_the_demonstrations_shows_each_once(
    with_words: Path, tmp_path: Path, world: None
) -> None:
    config = tiny.make_config(
        with_words, demonstrations__path=rows_file(tmp_path, ROWS), demonstrations__per_update=2
    )
    shown = Demonstrations(config, 1e9)
    prompts = [tuple(text.prompt) for step in range(5) for text in shown.of_update(step, 0, [1]).texts]
    assert len(set(prompts[:5])) == len(set(prompts[5:])) == 5 and prompts[:5] != prompts[5:]
    again = Demonstrations(config, 1e9)
    assert [tuple(t.prompt) for t in again.of_update(3, 0, [1]).texts] == prompts[6:8], "a resume goes on"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "w1"}, "no field 'response'"),
        ({"prompt": "w1", "response": " "}, "must be a text"),
        ({"prompt": "w1", "response": "w2 " * 70}, "have 72 tokens, at most 64 fit"),
    ],
    ids=["absent", "blank", "long"],
)
def test_a_row_that_cannot_be_shown_is_named(row: dict, words: str, with_words: Path, tmp_path: Path) -> None:
    config = tiny.make_config(with_words, demonstrations__path=rows_file(tmp_path, [*ROWS, row]))
    with pytest.raises(LaminarError) as refused:
        Demonstrations(config, 1e9)
    assert words in str(refused.value) and "row 6" in str(refused.value)


# ---- what is refused before a run --------------------------------------------------------------------------


def test_what_cannot_teach_is_refused(untied_model: Path, tied_model: Path, tmp_path: Path) -> None:
    policy = json.loads((untied_model / "config.json").read_text())
    other = tiny.make_model(tmp_path / "other", tie_word_embeddings=False)
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))

    def lines(**settings: object) -> str:
        config = tiny.make_config(untied_model, **settings)
        return "\n".join(wrong_teachers(config, policy))

    assert lines() == lines(teacher__model=str(untied_model)) == ""
    assert "tie_word_embeddings is True" in lines(teacher__model=str(tied_model))
    assert "other tokens" in lines(teacher__model=str(other))
    assert "no config.json" in lines(teacher__model=str(tmp_path / "none"))
    assert "write a directory or a URL" in lines(teacher__model={"a": 3})
    assert "not a URL" in lines(teacher__model="ftp://there")
    assert "user or password" in lines(teacher__model="http://me:secret@there:1")
    assert "temperature 1" in lines(teacher__model="http://there:1", sampling__temperature=0.7)
    assert "not set" in lines(teacher__model="http://there:1", teacher__api_key_env="LAMINAR_NO_SUCH_KEY")
    assert "one per token" in lines(teacher__model="http://there:1", algorithm__loss="gspo")
    exact = {"teacher__divergence": "reverse"}
    assert lines(teacher__model=str(untied_model), algorithm__loss="gspo", **exact) == ""
    assert "log-probs of drawn tokens alone" in lines(teacher__model="http://there:1", **exact)
    assert "does not train" in lines(teacher__model="http://there:1", algorithm__zero_variance="filter")
    several = {"a": "http://there:1", "b": "http://there:2"}
    assert "name one" in lines(teacher__model=several, source="replay:x")


def test_a_row_names_its_teacher_where_there_are_several(untied_model: Path) -> None:
    config = tiny.make_config(untied_model, teacher__model={"math": "http://a:1", "code": "http://b:1"})
    check_rows(config.teacher, [{"teacher": "math"}, {"teacher": "code"}])
    with pytest.raises(LaminarError, match=r"row 2 .*'teacher' is 'art', and teacher.model has math, code"):
        check_rows(config.teacher, [{"teacher": "math"}, {"teacher": "art"}])
