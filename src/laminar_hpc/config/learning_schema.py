"""Settings of what is learned, one dataclass per component; schema.py has the others, and says how they are
written. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

from laminar_hpc.config import objectives
from laminar_hpc.config.bounds import choice, choice_or_path, choices, number, seconds


@dataclass
class AlgorithmConfig:
    """How a batch becomes an update; docs/algorithms.md has formulas and sources. Default: GRPO with
    clip-higher, mean over all tokens."""

    prompts_per_step: int = number(32, at_least=1)
    """prompt groups in the global batch of a trainer step"""
    samples_per_prompt: int = number(8, at_least=2)
    """trajectories per prompt (the maximum, with `algorithm.first_samples`): the group over which advantages
    are taken"""
    first_samples: int | None = number(None, at_least=2)
    """so many at first, then more_samples at a time while all are wrong; null = all at once"""
    more_samples: int = number(2, at_least=1)
    """samples that a group gets at a time after its first, up to `algorithm.samples_per_prompt`"""
    zero_variance: str = choice("keep", "filter", "estimate")
    """groups whose rewards are all equal: keep, filter (draw other prompts), or estimate (AERO's mean)"""
    minibatches_per_step: int = number(2, at_least=1)
    """optimizer updates per trainer step"""
    advantage: str = choice_or_path((*objectives.ADVANTAGES, objectives.GAE))
    """how rewards become advantages, gae by a critic; or the dotted path of a function of your own, see
    algorithms.md"""
    normalize_std: bool = True
    """divide advantages by the group's standard deviation; of grpo only"""
    loss: str = choice_or_path(objectives.LOSSES)
    """policy loss; or the dotted path of a function of your own"""
    corrections: list[str] = field(
        default_factory=list, metadata=choices(objectives.CORRECTIONS, or_path=True)
    )
    """of tokens that another policy than the trained one has generated, in any number; also functions of
    your own"""
    options: dict[str, Any] = field(default_factory=dict)
    """numbers that the advantage, loss and corrections above read by name; of functions of your own
    whatever they read"""
    clip_low: float = number(0.2, at_least=0, at_most=1)
    """importance ratios are clipped below 1 - clip_low"""
    clip_high: float = number(0.28, at_least=0)
    """importance ratios are clipped above 1 + clip_high"""
    clip_dual: float | None = number(None, above=1)
    """of clip: no ratio above it counts for a negative advantage (dual clip); null = none"""
    loss_aggregation: str = choice("tokens", "sequences", "constant")
    """loss per: tokens, sequences, or constant (sequences x sampling.max_response_tokens)"""
    proximal: str = choice("behaviour", "recomputed")
    """ratios are taken to: behaviour (the engine's log-probs) or recomputed (at the start of the step)"""
    importance_weight_cap: float | None = number(None, above=0)
    """truncation of importance weights: proximal/behaviour if recomputed, current/behaviour of aipo"""
    sequence_ratio_min: float | None = number(None, at_least=0)
    """a trajectory is left out if its ratios' geometric mean is below; null = no bound"""
    sequence_ratio_max: float | None = number(None, above=0)
    """the same, above"""
    kl_coefficient: float = number(0.0, at_least=0)
    """weight of the KL divergence from the model of model.path, of which a copy is then held, but not beside
    an adapter; 0 = none"""
    kl_estimator: str = choice("k1", "k2", "k3", "k3_weighted", default="k3")
    """estimate of the divergence from one token; k3_weighted: k3 times the importance ratio"""
    kl_k3_max: float | None = number(10.0, above=0, at_most=1e30)
    """largest k3 of one token, as in verl, slime and NeMo RL; beyond it the token has no KL gradient, and is
    counted (`kl_bounded_tokens`); null = no bound"""
    kl_in_reward: bool = False
    """taken off the reward instead of added to the loss"""
    kl_target: float | None = number(None, above=0, at_most=1000)
    """KL per token, in nats, to which kl_coefficient is steered after each step; null = it is constant"""
    reference_every: int | None = number(None, at_least=1)
    """trainer steps after which the reference becomes the policy as it is then; null = never"""
    entropy_coefficient: float = number(0.0, at_least=0, at_most=1000)
    """weight of the entropy of each token's distribution, taken off the loss; 0 = none"""
    overlong_buffer_tokens: int = number(0, at_least=0)
    """the last so many below sampling.max_response_tokens cost up to 1 of reward; 0 = none"""
    length_penalty: float = number(0.0, at_least=0, at_most=1000)
    """rewards are divided by 1 + so much x length / mean length of the group; 0 = none"""
    likelihood_coefficient: float = number(0.0, at_least=0, at_most=1000)
    """weight of the mean negative log-likelihood of right answers' tokens, added to the loss; 0 = none"""
    routing_replay: Any = field(default="auto", metadata=choices(("auto", "true", "false")))
    """of a mixture of experts: the trainer sends each token to the experts that the engine sent it to; auto:
    of one in bfloat16; see algorithms.md"""
    shuffle_rewards: bool = False
    """negative control: rewards are permuted over the batch, so there is nothing to learn"""


@dataclass
class CriticConfig:
    """PPO's critic, with `algorithm.advantage=gae`: a model on the trainer ranks, at the policy's layout; its
    numbers are in `algorithm.options`, see algorithms.md."""

    path: str = ""
    """Hugging Face directory that it begins with, of the policy's architecture, as a reward model with one
    score; empty = that of `model.path`"""
    lr: float = number(1e-5, above=0, at_most=1)
    """Adam's learning rate; all else as in `optimizer`"""
    warmup_steps: int = number(0, at_least=0)
    """first trainer steps in which the critic alone is trained"""


@dataclass
class TeacherConfig:
    """On-policy distillation: what teachers say of the tokens that the policy has drawn; docs/algorithms.md
    has the formulas."""

    model: Any = ""
    """a Hugging Face directory of the policy's architecture, held on the trainer ranks; or the URL
    http(s)://HOST:PORT of an SGLang or vLLM server; or several, written {NAME: MODEL}, one of which each row
    names in its field `teacher`; empty = none"""
    divergence: str = choice("sampled", "reverse", "forward", "jsd")
    """of policy and teacher at each token: sampled, an estimate of the reverse KL from the drawn token, as an
    advantage; or of directories reverse KL, forward KL or Jensen-Shannon over the whole vocabulary, in the
    loss"""
    coefficient: float = number(1.0, above=0, at_most=1000)
    """weight of the divergence"""
    rewards: float = number(0.0, at_least=0, at_most=1000)
    """weight of the advantage that the rewards give, beside the teacher's; 0 = the teacher alone"""
    api_key_env: str = ""
    """of servers: the environment variable that holds their key, sent as a bearer token"""
    timeout_seconds: float = seconds(300.0)
    """of servers: longest time until all of a step's answers are there, tried again meanwhile"""


@dataclass
class DemonstrationsConfig:
    """Rows with a right answer, trained by likelihood beside the trajectories of each update."""

    path: str = ""
    """rows with a prompt, as in `data.train`, and an answer; empty = none"""
    response_field: str = "response"
    """field of a row that holds the whole answer, as the policy is to write it; its end token is added"""
    per_update: int = number(8, at_least=1)
    """rows with each optimizer update"""
    coefficient: float = number(1.0, above=0, at_most=1000)
    """weight of the mean negative log-likelihood of their answers' tokens, added to the loss"""


@dataclass
class GuardConfig:
    """The divergence guard: leaves trajectories out, skips updates, ends the run; see algorithms.md."""

    enabled: bool = True
    """whether there is one; there is none beside an emulated engine, whose log-probs are invented"""
    mismatch_max: float = number(1.0, above=0, at_most=100)
    """in nats: a trajectory whose mean |log-prob by the trainer - by the engine| is above is left out,
    whatever is usual in the run"""
    ratio_max: float = number(1000.0, above=1, at_most=1e9)
    """a trajectory with a larger importance ratio (current / behaviour) is left out"""
    spread: float = number(10.0, above=0, at_most=1e6)
    """how many times its spread a figure may be from its median over the window"""
    window: int = number(40, at_least=5, at_most=10_000)
    """optimizer updates over which median and spread are taken"""
    skip_share: float = number(0.25, at_least=0, below=1)
    """an update is skipped if more of its trajectories than this share are left out"""
    stop_after: int = number(3, at_least=1, at_most=10_000)
    """so many skipped updates among the last twice as many end the run"""


@dataclass
class OptimizerConfig:
    lr: float = number(1e-4, above=0, at_most=1)
    """Adam's learning rate; for a model of half a billion parameters or more begin with 1e-6"""
    weight_decay: float = number(0.0, at_least=0, at_most=1)
    """decoupled, as in AdamW"""
    beta1: float = number(0.9, at_least=0, below=1)
    """Adam's decay of the first moment"""
    beta2: float = number(0.95, at_least=0, below=1)
    """Adam's decay of the second moment"""
    eps: float = number(1e-8, above=0, at_most=1)
    """Adam's epsilon"""
    clip_grad: float = number(1.0, at_least=0)
    """largest global gradient norm; 0 = no clipping"""
    warmup_steps: int = number(0, at_least=0)
    """trainer steps of the learning rate's linear rise to `optimizer.lr`"""
    schedule: str = choice("constant", "linear", "cosine", "wsd")
    """of the learning rate after its rise: constant, or a fall to `optimizer.min_lr`: linear, half a cosine,
    or wsd, constant and then linear over the last `optimizer.decay_steps`"""
    decay_steps: int | None = number(None, at_least=1)
    """trainer steps of the fall; null = all of `steps` behind the rise"""
    min_lr: float = number(0.0, at_least=0, at_most=1)
    """learning rate at the end of the fall, and from there on"""
    max_skipped_updates: int = number(5, at_least=0)
    """non-finite gradients in a row before the run ends"""
