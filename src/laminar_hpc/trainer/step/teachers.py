"""On-policy distillation: what teachers say of the tokens that the policy has drawn. Called by
trainer/step/learner.py, before the updates and in each micro-batch.

With teacher.divergence=sampled a teacher gives the log-prob of each token, which becomes an advantage:

    A_t = rewards * A_t + coefficient * (log teacher_t - log policy_t)

With `policy` the one that ratios are taken to. The mean of the second term under the policy is minus the
reverse KL divergence KL(policy || teacher) of the token's distribution, and its policy gradient that of the
divergence: R. Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649 section 3.1;
Y. Gu et al., MiniLLM, arXiv 2306.08543 section 2.2, without the divergences of later tokens.

With reverse, forward or jsd it gives its last hidden states, and coefficient times the divergence over the
whole vocabulary, with its exact gradient, is added to each token's loss (trainer/megatron/distillation.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.teachers import SAMPLED, is_server, teachers_of
from laminar_hpc.trainer.megatron.distillation import TeacherRows
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.microbatch import MicroBatch, Text
from laminar_hpc.trainer.step.parallel import RankShare, total
from laminar_hpc.trainer.step.rescoring import ReferenceWeights, own_logprobs, own_states
from laminar_hpc.trainer.step.teacher_server import TeacherServer

LARGEST = 20.0  # of the difference of two log-probs, in nats: a teacher that rules a token out says -inf


class Teachers:
    """Those of config.teacher: directories as copies in the place of the policy's weights, URLs as
    servers."""

    def __init__(self, config: RunConfig, policy: MegatronPolicy) -> None:
        """`policy` has the weights of model.path, before and afterwards. Raises LaminarError for a directory
        that is no model of the policy's shape, and a server that cannot be reached or has other tokens."""
        self._policy = policy
        self._config = config.teacher
        self._several = len(teachers_of(config.teacher)) > 1
        self._held: dict[str, ReferenceWeights] = {}
        self._asked: dict[str, TeacherServer] = {}
        self._sampled_kl = 0.0
        self._heads: list[Tensor] = []  # of the directories in their order, where this rank has a head
        self._states: dict[int, tuple[Tensor, int]] = {}  # of a step's texts, and which head theirs is
        for name, model in teachers_of(config.teacher).items():
            if is_server(model):
                self._asked[name] = TeacherServer(model, config)
            else:
                self._held[name] = ReferenceWeights.of_directory(policy, model)
                with self._held[name].in_place():
                    if (head := policy.head_weight) is not None:
                        self._heads.append(head.detach())

    def advantages(
        self,
        given: Sequence[Tensor],
        own: Sequence[int],
        texts: Mapping[int, Text],
        names: Mapping[int, str],
        sampled: Mapping[int, Tensor],
        shares: list[RankShare],
        progress: Callable[[], None],
    ) -> list[Tensor]:
        """`given` with the teachers' part: of each text in `own` [trained tokens] float64; and keeps what the
        step's micro-batches need of them. `names`: each text's teacher where there are several; `sampled`:
        the policy's log-probs. Collective."""
        c, exact = self._config, self._config.divergence != SAMPLED
        logprobs = dict[int, Tensor]()
        self._states = {}
        for number, (name, weights) in enumerate(self._held.items()):
            mine = {i for i in own if not self._several or names[i] == name}
            with weights.in_place():
                only = {i: replace(texts[i], routes=None) for i in mine}  # a teacher's router is its own
                words = self._policy, only, _only(shares, mine), progress
                if exact:
                    self._states |= {i: (of, number) for i, of in own_states(*words).items()}
                else:
                    logprobs |= own_logprobs(*words)
        if exact:
            return [c.rewards * of for of in given]
        for name, server in self._asked.items():
            mine = {i for i in own if not self._several or names[i] == name}
            logprobs |= server.logprobs({i: texts[i] for i in sorted(mine)}, progress)
        gaps = [(logprobs[i].double() - sampled[i].double()).clamp(-LARGEST, LARGEST) for i in own]
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *gaps])
        summed = torch.stack((flat.sum(), torch.tensor(len(flat), dtype=torch.float64)))
        difference, tokens = total(summed, self._policy.device).tolist()
        self._sampled_kl = -difference / max(1.0, tokens)
        return [c.rewards * of + c.coefficient * gap for of, gap in zip(given, gaps, strict=True)]

    def beside(self, batch: MicroBatch, places: Sequence[int]) -> MicroBatch:
        """The micro-batch of the step's texts at these places, which asks for their divergences where those
        are exact and this pipeline stage has a head."""
        if not places or not self._states:
            return batch
        of_each = [self._states[i] for i in places]
        which = [torch.full((len(states),), number) for states, number in of_each]
        wanted, rows = batch.pack.wanted, torch.cat([states for states, _ in of_each])
        alone = len(batch.pack.targets) - len(wanted)  # a context-parallel rank with no target has one row
        chosen = torch.cat([wanted, wanted.new_zeros(alone)])
        teacher = TeacherRows(
            rows.to(wanted.device, non_blocking=True)[chosen],
            torch.cat(which).to(wanted.device)[chosen],
            self._heads,
            self._config.divergence,
        )
        return replace(batch, pack=replace(batch.pack, teacher=teacher))

    def mean(self, beside: float) -> float:
        """Of the divergence over the trained tokens of the step, in nats; `beside`: the mean of what was
        added to their losses."""
        return self._sampled_kl if self._config.divergence == SAMPLED else beside / self._config.coefficient


def _only(shares: list[RankShare], mine: set[int]) -> list[RankShare]:
    """The same micro-batches with these texts alone: every rank runs as many."""
    return [s._replace(plan=[[i for i in part if i in mine] for part in s.plan]) for s in shares]
