"""Routing replay in the trainer: each token goes to the experts that its response came with, and all else is
as without it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks
from helpers.trainer.routes import (
    Forced,
    drawn_for,
    drawn_routes,
    free_routes,
    routed_batch,
    shape_of,
    tokens_of,
)
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.store.payload.layout import Response, Routes, drawn
from laminar_hpc.trainer.megatron.packs import make_pack
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.microbatch import Example, Text, make_microbatch, text_pack
from laminar_hpc.trainer.step.routes import routed

RECOMPUTE = ("none", "selective", "full")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.make_model(root / name, 1, **shape) for name, shape in tiny.EXPERTS.items()}


def policy_of(model: Path, replay: str = "true", **settings: object) -> MegatronPolicy:
    return MegatronPolicy(tiny.make_config(model, algorithm__routing_replay=replay, **settings))


def gradients(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in policy.gpt.named_parameters()}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("family", tiny.EXPERTS)
def test_the_routers_own_choices_change_nothing(family: str, models: dict[str, Path]) -> None:
    """Metrics and gradients are bit for bit those without replay, and no choice is another."""
    batch, by_transformers = tiny.make_batch(seed=1), tiny.transformers_model(models[family])
    routes = {t.trajectory_id: free_routes(by_transformers, tokens_of(t)) for t in batch}
    found = []
    for replay in ("false", "true"):
        policy = policy_of(models[family], replay, optimizer__lr=0.0)
        metrics = Learner(policy.config, policy).train(routed_batch(batch, routes), 0, lambda: None)
        found.append((metrics, gradients(policy)))
    (free, expected), (replayed, same) = found
    assert replayed.pop("routing_difference") == 0 and replayed == free
    assert all(torch.equal(same[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("qwen3-moe", "none"),
        ("qwen2-moe", "selective"),
        ("mixtral", "full"),
        *(
            pytest.param(family, recompute, marks=pytest.mark.slow)
            for family, left in (("qwen3-moe", 0), ("qwen2-moe", 1), ("mixtral", 2))
            for recompute in (*RECOMPUTE[:left], *RECOMPUTE[left + 1 :])
        ),
    ],
)
def test_other_routes_train_as_transformers_with_them_forced(
    family: str, recompute: str, models: dict[str, Path]
) -> None:
    """Three steps over several micro-batches: losses and gradient norms to 1e-5, routers to 1e-6, which have
    learned, log-probs to 1e-4; whatever is computed again in the backward pass."""
    settings = {"optimizer__lr": 1e-3, "trainer__recompute_activations": recompute}
    policy, shape = policy_of(models[family], **settings), shape_of(models[family])
    learner, model = Learner(policy.config, policy), tiny.transformers_model(models[family])
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.0}
        for matrix in (True, False)
    ]
    c = policy.config.optimizer
    adam = torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps)
    for step in range(3):
        batch = tiny.make_batch(seed=100 + step)
        routes = drawn_for(shape, batch)
        forced = Forced(model, {tuple(tokens_of(t)): routes[t.trajectory_id] for t in batch})
        metrics = learner.train(routed_batch(batch, routes), step, lambda: None)
        loss = tiny.reference_loss(forced, batch, policy.config)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_grad)
        adam.step()
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert 0.5 < metrics["routing_difference"] < 1
    before, weights = tiny.published(models[family]), dict(policy.canonical_tensors())
    for layer, of_transformers in enumerate(model.model.layers):
        [name] = [n for n in weights if n.startswith(f"model.layers.{layer}.") and n.endswith(".gate.weight")]
        assert (weights[name] - of_transformers.mlp.gate.weight).abs().max() < 1e-6
        assert (weights[name] - before[name]).abs().max() > 5e-4
    texts = [Text(t.whole.prompt, t.response, routes[t.trajectory_id]) for t in batch]
    expected = torch.cat(
        [tiny.token_logprobs(forced, t)[0][torch.tensor(t.mask, dtype=torch.bool)] for t in batch]
    )
    [scored] = policy.score([text_pack(texts, policy.device)])
    assert (scored - expected.detach()).abs().max() < 1e-4


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_fills_up_a_pack_has_no_part_in_it(recompute: str, models: dict[str, Path]) -> None:
    """A text's last token predicts nothing, so it is in no pack and has no route. The tokens that fill up a
    pack are routed freely and not counted: gradients and the difference are those without them."""
    batch = tiny.make_batch(seed=3)[:4]
    shape = shape_of(models["qwen2-moe"])
    routes = drawn_for(shape, batch)
    found = []
    for size in (0, 150):
        policy = policy_of(models["qwen2-moe"], trainer__recompute_activations=recompute)
        texts = [Text(t.whole.prompt, t.response, routes[t.trajectory_id]) for t in batch]
        ones = [Example(text, torch.ones(text.response.trained)) for text in texts]
        micro = make_microbatch(ones, policy.device, size)
        assert len(micro.pack.tokens) >= size
        assert len(micro.pack.layout.routes) == sum(len(tokens_of(t)) - 1 for t in batch)
        policy.accumulate(
            [micro], lambda b, logprobs, e: (logprobs.sum(), torch.ones((), dtype=torch.int), torch.zeros(()))
        )
        found.append((gradients(policy), policy.routing.difference()))
    (few, counted), (filled, same) = found
    assert counted == same > 0.5
    assert all((few[name] - filled[name]).abs().max() < 2e-6 for name in few)
    assert min(few[name].abs().max() for name in few) > 1e-3


@pytest.mark.usefixtures("world")
def test_log_probs_without_gradient_take_the_same_routes(models: dict[str, Path]) -> None:
    """What a reference that is still the policy scores before a step is what the first update computes; with
    free routing it would not be."""
    settings = {"algorithm__kl_coefficient": 0.1}
    batch = tiny.make_batch(seed=1)
    policy = policy_of(models["qwen3-moe"], **settings)
    routes = drawn_for(shape_of(models["qwen3-moe"]), batch)
    metrics = Learner(policy.config, policy).train(routed_batch(batch, routes), 0, lambda: None)
    assert metrics["kl"] == 0
    text = Text(batch[0].whole.prompt, batch[0].response, routes[0])
    replayed, free = policy.score(
        [text_pack([each], policy.device) for each in (text, replace(text, routes=None))]
    )
    assert (replayed - free).abs().max() > 1e-2


@pytest.mark.usefixtures("world")
def test_each_branch_has_its_own_routes(models: dict[str, Path]) -> None:
    """Those of its own tokens; whatever stands for a branch's last token is not looked at."""
    shape = shape_of(models["qwen3-moe"])
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 15).astype(np.int32)
    spans, starts = [VersionSpan(1, 0, 4), VersionSpan(1, 9, 15)], [4]
    response = Response(7, 0, tokens, np.full(15, -3.9, np.float32), spans, drawn(15, spans, starts))
    routes = drawn_routes(shape, 18, 0)
    routes[6] = 99  # the first branch: three tokens of the prompt and four of the response
    policy = policy_of(models["qwen3-moe"])
    text = Text(np.array([3, 1, 2], np.int32), replace(response, routed_experts=routes))
    text = routed({0: text}, shape, policy.routing.layers, 10.0)[0]
    parts = [
        make_pack([[3, 1, 2, *tokens[:4]]], [range(3, 7)], policy.device, 0, [routes[:6]]),
        make_pack([tokens[4:]], [range(5, 11)], policy.device, 0, [routes[7:]]),
    ]
    [together], alone = policy.score([text_pack([text], policy.device)]), policy.score(parts)
    torch.testing.assert_close(together, torch.cat(list(alone)))


def with_last(routes: Routes, chosen: list[int]) -> Routes:
    """The last token's experts in the last layer are others."""
    routes = routes.astype(np.int16)
    routes[-1, -1] = chosen
    return routes


WRONG = {
    "none": (lambda routes: None, "came without the experts that the engine sent its tokens to"),
    "short": (lambda routes: routes[1:], "has routes uint8"),
    "layers": (lambda routes: routes[:, :1], "has routes uint8"),
    "floats": (lambda routes: routes.astype(np.float32), "has routes float32"),
    "above": (lambda routes: with_last(routes, [3, 8]), "has expert 8 of 8 in a route"),
    "below": (lambda routes: with_last(routes, [-1, 3]), "has expert -1 of 8 in a route"),
    "twice": (lambda routes: with_last(routes, [3, 3]), "has an expert twice in the route of a token"),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_routes_are_refused(wrong: str, models: dict[str, Path]) -> None:
    """In one line that names the trajectory, before anything is trained."""
    batch, (change, said) = tiny.make_batch(seed=1), WRONG[wrong]
    routes = drawn_for(shape_of(models["qwen3-moe"]), batch)
    routes[5] = change(routes[5])
    policy = policy_of(models["qwen3-moe"])
    with pytest.raises(LaminarError, match=f"^trajectory 5 {said}") as refused:
        Learner(policy.config, policy).train(routed_batch(batch, routes), 0, lambda: None)
    assert "\n" not in str(refused.value) and "algorithm.routing_replay=false" in str(refused.value)


def test_all_ranks_refuse_what_one_has_read(ranks: Ranks, models: dict[str, Path]) -> None:
    """No rank waits for one that has stopped."""
    settings = {"trainer__data_parallel": 2}
    said = ranks.run(
        2, "routes:train_without_one", model=str(models["mixtral"]), settings=settings, missing=6
    )
    assert said[0] == said[1] and said[0].startswith("trajectory 6 came without")


# name -> tensor, pipeline, context, data, expert parallel, virtual stages
LAYOUTS = {
    "tp2-ep2": (2, 1, 1, 1, 2, 1),
    "tp2": (2, 1, 1, 1, 1, 1),
    "pp2": (1, 2, 1, 1, 1, 1),
    "pp2-ep2-dp2": (1, 2, 1, 2, 2, 1),
    "cp2-ep2": (1, 1, 2, 1, 2, 1),
    "cp2-tp2-ep4": (2, 1, 2, 1, 4, 1),
    "virtual": (1, 2, 1, 1, 1, 2),
    "virtual-ep2-dp2": (1, 2, 1, 2, 2, 2),
    "cp2-pp2-tp2-ep2": (2, 2, 2, 1, 2, 1),
}
FEW = [("tp2-ep2", "none"), ("cp2-ep2", "full"), ("virtual", "selective")]


def layout_settings(layout: str, recompute: str) -> dict[str, object]:
    tensor, pipeline, context, data, expert, virtual = LAYOUTS[layout]
    return {
        "trainer__tensor_parallel": tensor,
        "trainer__pipeline_parallel": pipeline,
        "trainer__context_parallel": context,
        "trainer__data_parallel": data,
        "trainer__expert_parallel": expert,
        "trainer__virtual_stages": virtual,
        "trainer__recompute_activations": recompute,
        "trainer__tokens_per_microbatch": 64 // context,
        "optimizer__lr": 1e-3,
    }


def check_layout(layout: str, recompute: str, ranks: Ranks, folder: Path) -> None:
    model = tiny.make_model(folder / "model", 1, **{**tiny.EXPERTS["qwen3-moe"], "num_hidden_layers": 4})
    arguments = {"model": str(model), "count": 3}
    one = ranks.run(1, "routes:train", **arguments, settings={"optimizer__lr": 1e-3})[0]
    world, settings = int(np.prod(LAYOUTS[layout][:4])), layout_settings(layout, recompute)
    found = ranks.run(world, "routes:train", **arguments, settings=settings)
    for of_rank in found:
        for ours, theirs in zip(of_rank["metrics"], one["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert one["weights"] and all(
        np.abs(found[0]["weights"][name] - weight).max() < 1e-6 for name, weight in one["weights"].items()
    )


@pytest.mark.parametrize(("layout", "recompute"), FEW)
def test_layouts_replay_as_one_rank(layout: str, recompute: str, ranks: Ranks, tmp_path: Path) -> None:
    """Promise: with routes that no router would choose, all metrics and the weights after three steps of
    several micro-batches are those of one rank to 1e-6, whatever is computed again in the backward pass."""
    check_layout(layout, recompute, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_replays_as_one_rank(layout: str, recompute: str, ranks: Ranks, tmp_path: Path) -> None:
    """The whole matrix of the test above."""
    check_layout(layout, recompute, ranks, tmp_path)
