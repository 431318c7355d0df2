"""On-policy distillation: teachers' log-probs of the tokens that the policy has drawn, as advantages. Called
by trainer/step/learner.py before the updates.

    A_t = rewards * A_t + coefficient * (log teacher_t - log policy_t)

With `policy` the one that ratios are taken to. The mean of the second term under the policy is minus the
reverse KL divergence KL(policy || teacher) of the token's distribution, and its policy gradient that of the
divergence: R. Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649 section 3.1;
Y. Gu et al., MiniLLM, arXiv 2306.08543 section 2.2, without the divergences of later tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.teachers import is_server, teachers_of
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.microbatch import Text
from laminar_hpc.trainer.step.parallel import RankShare, total
from laminar_hpc.trainer.step.rescoring import ReferenceWeights, own_logprobs
from laminar_hpc.trainer.step.teacher_server import TeacherServer

LARGEST = 20.0  # of the difference of two log-probs, in nats: a teacher that rules a token out says -inf


class Teachers:
    """Those of config.teacher: directories as copies in the place of the policy's weights, URLs as servers.
    `kl`: of the last batch, the mean of log policy - log teacher over its trained tokens."""

    def __init__(self, config: RunConfig, policy: MegatronPolicy) -> None:
        """`policy` has the weights of model.path, before and afterwards. Raises LaminarError for a directory
        that is no model of the policy's shape, and a server that cannot be reached or has other tokens."""
        self._policy = policy
        self._config = config.teacher
        self._several = len(teachers_of(config.teacher)) > 1
        self._held: dict[str, ReferenceWeights] = {}
        self._asked: dict[str, TeacherServer] = {}
        self.kl = 0.0
        for name, model in teachers_of(config.teacher).items():
            if is_server(model):
                self._asked[name] = TeacherServer(model, config)
            else:
                self._held[name] = ReferenceWeights.of_directory(policy, model)

    def advantages(
        self,
        given: Sequence[torch.Tensor],
        own: Sequence[int],
        texts: Mapping[int, Text],
        names: Mapping[int, str],
        sampled: Mapping[int, torch.Tensor],
        shares: list[RankShare],
        progress: Callable[[], None],
    ) -> list[torch.Tensor]:
        """`given` with the teachers' part: of each text in `own` [trained tokens] float64. `names`: each
        text's teacher where there are several; `sampled`: the policy's log-probs. Collective."""
        logprobs = dict[int, torch.Tensor]()
        for name, weights in self._held.items():
            mine = {i for i in own if not self._several or names[i] == name}
            with weights.in_place():
                only = {i: replace(texts[i], routes=None) for i in mine}  # a teacher's router is its own
                logprobs |= own_logprobs(self._policy, only, _only(shares, mine), progress)
        for name, server in self._asked.items():
            mine = {i for i in own if not self._several or names[i] == name}
            logprobs |= server.logprobs({i: texts[i] for i in sorted(mine)}, progress)
        gaps = [(logprobs[i].double() - sampled[i].double()).clamp(-LARGEST, LARGEST) for i in own]
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *gaps])
        summed = torch.stack((flat.sum(), torch.tensor(len(flat), dtype=torch.float64)))
        difference, tokens = total(summed, self._policy.device).tolist()
        self.kl = -difference / max(1.0, tokens)
        c = self._config
        return [c.rewards * of + c.coefficient * gap for of, gap in zip(given, gaps, strict=True)]


def _only(shares: list[RankShare], mine: set[int]) -> list[RankShare]:
    """The same micro-batches with these texts alone: every rank runs as many."""
    return [s._replace(plan=[[i for i in part if i in mine] for part in s.plan]) for s in shares]
