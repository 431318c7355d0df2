"""Demonstrations in the mix: rows with a right answer, whose likelihood is raised beside each update's
trajectories. Used by trainer/step/learner.py.

    loss + coefficient * mean over the demonstrations' answer tokens of -log pi_t

They are rows of a file and no trajectories: nothing is generated, and no advantage, ratio, mean or count of
the batch has them in it. They have micro-batches of their own, behind those of the trajectories.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.models import model_config, read_json
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import parse_source
from laminar_hpc.data.prompts import check_token_ids, demonstrated, load_prompts
from laminar_hpc.data.tokens import load_tokenizer, stop_token_ids
from laminar_hpc.environments.run_prompts import run_render
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.trainer.algorithms.tokens import Tokens as TrainedTokens
from laminar_hpc.trainer.step.microbatch import MicroBatch, Text, text_pack
from laminar_hpc.trainer.step.parallel import RankShare, own_share, reduced


class Demonstrations:
    """Those of config.demonstrations. The same on every rank."""

    def __init__(self, config: RunConfig, even: float) -> None:
        """`even` as in packing.py's `work`. Raises Refused with the rows that cannot be used."""
        self._config = config
        self._even = even
        self._texts = _texts(config)
        self._sums = list[torch.Tensor]()
        self._tokens = 0
        self._lengths = [len(text.prompt) + len(text.response.tokens) for text in self._texts]

    def of_update(self, step: int, update: int, trained: Sequence[int]) -> "OfUpdate":
        """This rank's part of those of one update: each row once in a pass over the rows, in an order by the
        run's seed. `trained`: tokens of each trajectory of the update."""
        a, per_update, rows = self._config.algorithm, self._config.demonstrations.per_update, len(self._texts)
        first = (step * a.minibatches_per_step + update) * per_update
        chosen = [self._order(at // rows)[at % rows] for at in range(first, first + per_update)]
        lengths, budget = [self._lengths[i] for i in chosen], self._config.trainer.pack_tokens
        share = own_share(lengths, list(range(per_update)), budget, self._even)
        count = sum(trained) if a.loss_aggregation == "tokens" else len(trained)
        tokens = sum(self._texts[i].response.trained for i in chosen)
        self._tokens += tokens
        weight = self._config.demonstrations.coefficient * count / tokens
        return OfUpdate([self._texts[i] for i in chosen], share, weight, self._sums)

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Collective: the mean negative log-likelihood of the answer tokens since it was asked for last,
        `demonstration_loss`."""
        total = sum(self._sums, torch.zeros((), device=device))
        mean = float(reduced(total)) / max(1, self._tokens)
        self._sums.clear()
        self._tokens = 0
        return {"demonstration_loss": mean}

    def _order(self, number: int) -> list[int]:
        order = list(range(len(self._texts)))
        random.Random(f"demonstrations {self._config.seed} {number}").shuffle(order)
        return order


@dataclass(frozen=True)
class OfUpdate:
    """The demonstrations of one update, and this rank's share of them, by places in `texts`. `weight`: of
    each answer token's log-prob in the mini-batch's summed loss; `sums`: where `note` leaves what it is
    told."""

    texts: list[Text]
    share: RankShare
    weight: float
    sums: list[torch.Tensor]

    def micro_batch(self, number: int, device: torch.device, size: int) -> MicroBatch:
        """The tokens belong to no trajectory and are not `real`: nothing but their likelihood counts."""
        texts = [self.texts[place] for place in self.share.plan[number]]
        zero = torch.zeros(sum(text.response.trained for text in texts) or 1, device=device)
        weights = torch.full_like(zero, self.weight if texts else 0.0)
        tokens = TrainedTokens(zero, zero, None, zero, zero.long(), 0, zero, zero, zero, zero, weights)
        return MicroBatch(text_pack(texts, device, size), tokens)

    def note(self, sums: Sequence[torch.Tensor]) -> None:
        """Of each micro-batch on the last pipeline stage, the sum of its tokens' -log-probs."""
        parts = zip(self.share.plan, sums, strict=False)
        self.sums.extend(value for part, value in parts if part)


def _texts(config: RunConfig) -> list[Text]:
    """The rows, rendered as prompts are, each answer with the end token."""
    of, path = config.demonstrations, config.model.path
    source = parse_source("demonstrations.path", of.path)
    tokenizer, model = load_tokenizer(path), model_config(path)
    longest = min(config.trainer.pack_tokens, model.get("max_position_embeddings") or 1 << 30)
    data = replace(config.data, answer_field="", max_prompt_tokens=None)
    prompts = load_prompts(source, data, tokenizer, run_render(config), longest)
    check_token_ids(prompts, model["vocab_size"])
    end, texts, wrong = _end_token(config), list[Text](), list[str]()
    for prompt in prompts.prompts:
        try:
            answer = demonstrated(prompt.row, of.response_field, prompt.where)
            tokens = [*tokenizer.encode(answer, add_special_tokens=False).ids, end]
            if len(prompt.tokens) + len(tokens) > longest:
                raise LaminarError(
                    f"{prompt.where}: prompt and answer have {len(prompt.tokens) + len(tokens)} tokens, at "
                    f"most {longest} fit; leave the row out, or raise trainer.tokens_per_microbatch"
                )
        except LaminarError as error:
            wrong.append(str(error))
            continue
        texts.append(_text(prompt.tokens, tokens))
    if wrong:
        raise Refused(wrong[:8])
    return texts


def _text(prompt: list[int], answer: list[int]) -> Text:
    tokens = np.array(answer, np.int32)
    runs = np.array([len(answer)], np.uint32)
    response = Response(-1, 0, tokens, np.zeros(len(answer), np.float32), [], runs)
    return Text(np.array(prompt, np.int32), response)


def _end_token(config: RunConfig) -> int:
    """The tokenizer's end-of-sequence token where it ends a response, else the first token that does."""
    folder = Path(config.model.path)
    named = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    found, ends = load_tokenizer(str(folder)).token_to_id(str(text)), stop_token_ids(folder)
    return found if found in ends else ends[0]
