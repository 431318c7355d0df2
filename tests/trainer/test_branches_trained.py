"""docs/promises.md#branches: to the trainer a response's branches are sequences of one trajectory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.trainer import tiny
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.store.payload.layout import Response, drawn
from laminar_hpc.trainer.megatron.packs import make_pack
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.microbatch import Example, Text, branches, make_microbatch, text_pack, trained

# given and drawn tokens: a turn, then a branch of two turns, then a branch of one
PARTS = [(0, 4), (5, 3), (2, 3), (6, 2)]
STARTS = [4, 17]


def response(seed: int = 0) -> Response:
    spans, at = [], 0
    for given, own in PARTS:
        spans.append(VersionSpan(1, at + given, at + given + own))
        at += given + own
    tokens = np.random.default_rng(seed).integers(0, tiny.VOCAB, at).astype(np.int32)
    logprobs = np.full(at, -3.9, np.float32)
    return Response(0, 0, tokens, logprobs, spans, drawn(at, spans, STARTS))


def test_each_branch_is_a_sequence_of_its_own(tied_model: Path, world: None) -> None:
    """Their log-probs are those of the sequences alone, in the order of the response's trained tokens, and
    no longer than the text is planned; all trained tokens are of one trajectory."""
    policy = MegatronPolicy(tiny.make_config(tied_model))
    text = Text(np.array([3, 1, 2], np.int32), response())
    tokens, mask = text.response.tokens, text.response.loss_mask
    found = branches(text)
    assert [s.tolist() for s, _ in found] == [
        [3, 1, 2, *tokens[:4]], tokens[4:17].tolist(), tokens[17:].tolist()
    ]  # fmt: skip
    pack = text_pack([text], policy.device)
    assert pack.targets.tolist() == tokens[mask].tolist()
    assert len(pack.tokens) == len(text.prompt) + len(tokens) - 3
    [together] = policy.score([pack])
    alone = policy.score([make_pack([s], [chosen], policy.device) for s, chosen in found])
    assert len(together) == len(trained(text))
    torch.testing.assert_close(together, torch.cat(list(alone)))
    whole = Text(text.prompt, Response(0, 0, tokens, text.response.logprobs, text.response.spans,
                                       drawn(len(tokens), text.response.spans)))  # fmt: skip
    [as_one] = policy.score([text_pack([whole], policy.device)])
    assert not torch.allclose(together[4:], as_one[4:])
    other = Example(text, torch.ones(12))
    assert make_microbatch([other, other], policy.device).tokens.sequence.tolist() == [0] * 12 + [1] * 12


@pytest.mark.parametrize("aggregation", ["tokens", "sequences"])
def test_a_branched_trajectory_counts_once(aggregation: str, tied_model: Path, world: None) -> None:
    """Its gradient is that of its branches as trajectories of their own, each with the weight of its drawn
    tokens: by tokens one each; by sequences together that of one trajectory, beside another one."""
    config = tiny.make_config(tied_model, algorithm__loss_aggregation=aggregation)
    policy = MegatronPolicy(config)
    learner, text = Learner(config, policy), Text(np.array([3, 1, 2], np.int32), response())
    short = tiny.examples(tiny.make_batch(seed=5)[:1])[0]
    alone = [alone_of(text, *part) for part in branches(text)]

    def gradient(examples: list[Example]) -> torch.Tensor:
        policy.accumulate([make_microbatch(examples, policy.device)], learner._loss)
        return torch.cat([p.main_grad.flatten().clone() for p in policy.gpt.parameters()])

    counts = [one.response.trained for one in alone]
    weights = [1.0] * 4 if aggregation == "tokens" else [*(4 / 2 * n / sum(counts) for n in counts), 2.0]
    parts = [Example(t, torch.full((n,), w)) for t, n, w in zip(alone, counts, weights, strict=False)]
    other = Example(short.text, short.advantages * weights[-1])
    found, expected = gradient([Example(text, torch.ones(12)), short]), gradient([*parts, other])
    assert found.norm() > 0 and sum(counts) == 12 and len(counts) == 3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(found.abs().max()))


def alone_of(text: Text, tokens: np.ndarray, chosen: np.ndarray) -> Text:
    """A branch as a trajectory whose prompt is its first token."""
    mask = np.isin(np.arange(1, len(tokens)), chosen)
    spans = [VersionSpan(1, i, i + 1) for i in np.flatnonzero(mask)]
    columns = tokens[1:], np.full(len(mask), -3.9, np.float32)
    return Text(tokens[:1], Response(1, 0, *columns, spans, drawn(len(mask), spans)))
