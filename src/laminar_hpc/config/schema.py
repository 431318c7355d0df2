"""Every setting of a run, as dataclasses, one per component; those of the running system are in
system_schema.py. `conf/` holds their values, these files their types, units and defaults.

A number stands with its bounds, a word with its choices (see bounds.py); `config.load.load_config` refuses
what is outside. The text below a key is its meaning in docs/configuration.md. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from laminar_hpc.config import objectives
from laminar_hpc.config.bounds import choice, choice_or_path, choices, choices_or_paths, number, seconds
from laminar_hpc.config.system_schema import (
    RANKS_MAX,
    THREADS_MAX,
    CheckpointConfig,
    ClusterConfig,
    EmulationConfig,
    EvaluationConfig,
    ObservabilityConfig,
    PipelineConfig,
    RelayConfig,
    RolloutConfig,
    TrainerConfig,
)

LORA_RANK_MAX = 512  # memory for so large an adapter is set aside in each engine, many times

RENAMED = {  # keys of earlier versions: refused with the new name; read where a finished run's file has them
    "algorithm.denominator": "algorithm.loss_aggregation",
    "algorithm.weight_max": "algorithm.importance_weight_cap",
    "relay.anchor_every": "relay.full_every",
}


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685): two small matrices beside each adapted linear layer are
    trained in place of the model's weights, which stay as they are; see docs/models.md."""

    rank: int = number(0, at_least=0, at_most=LORA_RANK_MAX)
    """of the adapters; 0 = no adapter, all weights are trained"""
    alpha: float = number(32.0, above=0, at_most=100_000)
    """an adapter's product is multiplied by alpha / rank"""
    targets: str = choice("all", "attention", "mlp")
    """linear layers that have an adapter: attention (q, k, v, o), mlp (gate, up, down) or all seven"""
    init: str = choice("kaiming", "gaussian")
    """first values of the matrix A; B begins at 0, so that a new adapter changes nothing. kaiming: uniform
    within 1 / sqrt(inputs); gaussian: of standard deviation 1 / rank"""
    path: str = ""
    """directory of an adapter to go on from, as PEFT writes it; empty = a new one"""


@dataclass
class ModelConfig:
    """The policy: a Hugging Face directory (config.json, *.safetensors, tokenizer.json), or
    OWNER/NAME[@REVISION] of the hub; see docs/models.md."""

    path: str = ""
    """Hugging Face directory of the model to train, or OWNER/NAME[@REVISION] of the hub; see models.md"""
    dtype: str = choice("float32", "bfloat16")
    """of the weights in trainer and engine; the optimizer keeps its own in float32"""
    float32_head: bool = True
    """of bfloat16: trainer and engine do not round the logits to it"""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DataConfig:
    """Prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset; see docs/data.md."""

    train: str = ""
    """the training prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset as
    OWNER/NAME[:SUBSET][@SPLIT]"""
    prompt_field: str = "prompt"
    """field of a row that holds the prompt; a text or chat messages; `a.b` is a field within a field, `a|b`
    the first that a row has"""
    answer_field: str = ""
    """field of a row that holds the right answer; given to the reward as row["answer"]; empty = rows as they
    are"""
    chat_template: bool = False
    """render prompts with the model's chat template; false = text as it is"""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """variables of the chat template, as {enable_thinking: false}; and continue_final_message, true where a
    prompt's last message is the assistant's and the response goes on from it"""
    system_prompt: str = ""
    """the system's message before prompts that have none; with the chat template"""
    max_prompt_tokens: int | None = number(None, at_least=1)
    """longest prompt; null = what fits beside a response"""
    too_long: str = choice("refuse", "drop")
    """a prompt with more tokens: refuse the file, or drop the row and count it"""
    drop_duplicates: bool = False
    """rows with the same prompt and answer count once"""
    shuffle: bool = True
    """a new order per pass over the rows, by seed"""


@dataclass
class RewardFunction:
    """One of `reward.functions`: a Python function or a reward model behind a URL, and its weight."""

    function: str = ""
    """dotted path; or else a url"""
    url: str = ""
    """http(s)://HOST:PORT/PATH of a reward model"""
    weight: float = 1.0
    style: str = "laminar"
    """of a function: laminar | trl | verl; of a URL: laminar | sglang (its /classify)"""
    api_key_env: str = ""
    """of a URL: the environment variable that holds its key, sent as a bearer token"""


@dataclass
class RewardConfig:
    """The reward: `function`, or the weighted sum of `functions`, in processes of each rollout rank."""

    function: str = ""
    """dotted path, plain or async; returns a float or a dict with "reward" and named parts"""
    style: str = choice("laminar", "trl", "verl")
    """functions written for the latter two run unchanged"""
    functions: dict[str, Any] = field(default_factory=dict)
    """several by name, in place of function"""
    workers: int = number(1, at_least=1, at_most=THREADS_MAX)
    """processes per rollout rank; more while calls wait, hang or compute for long"""
    slots: int = number(64, at_least=1)
    """calls in flight per rollout rank; each call of a plain function is in a process of its own"""
    timeout_seconds: float = seconds(10.0)
    """longest time for one call; then the trajectory gets `reward.score_on_failure`"""
    score_on_failure: float = number(0.0, at_least=-1_000_000, at_most=1_000_000)
    """in place of a reward whose call raised, hung or returned something else"""


@dataclass
class EnvironmentConfig:
    """Responses of several turns with tools, called in processes of each rollout rank; see environments.md.
    `factory`, `tools`, `agent` or `verifiers`, or none of them: one turn."""

    factory: Any = ""
    """dotted path of a class (TRL's contract): reset(**row), public methods as tools, get_reward(); or
    several, written {NAME: PATH}, one of which each row names in its field `environment`"""
    tools: list[str] = field(default_factory=list)
    """dotted paths of functions that the model may call; the reward is that of `reward`"""
    agent: str = ""
    """dotted path of run(row, base_url, api_key, model), which talks to the model as to OpenAI's API"""
    verifiers: Any = ""
    """a taskset of the package verifiers, under environment.python: its id, or verifiers' own [env] table"""
    python: str = ""
    """interpreter of what the four above name, where that cannot live beside our packages, as
    /path/.venv/bin/python: Python 3.11 or newer with msgspec and pydantic; empty = ours"""
    max_turns: int = number(8, at_least=1)
    """answers of the model in one trajectory"""
    max_tool_calls: int = number(16, at_least=1)
    """in one trajectory"""
    history: str = choice("refuse", "keep", "branch")
    """where the chat template or an agent rewrites earlier turns: refuse it; keep what was drawn (the
    template's rewriting only); or branch: what is rewritten begins another sequence of the trajectory"""
    timeout_seconds: float = seconds(30.0)
    """longest time for one reset, tool call or get_reward, and between two requests of an agent"""
    max_seconds: float = seconds(600.0)
    """a trajectory that takes longer ends with its turn, and is graded on what is there"""

    @property
    def factories(self) -> dict[str, str]:
        """Dotted paths by name; of one alone the name is ""."""
        if isinstance(self.factory, dict):
            return self.factory
        return {"": self.factory} if self.factory else {}

    @property
    def several(self) -> bool:
        """Responses have several turns."""
        return bool(self.factory or self.tools or self.by_url)

    @property
    def stays(self) -> bool:
        """Trajectories end where they have begun, or begin again."""
        return self.by_url or self.history == "branch"

    @property
    def by_url(self) -> bool:
        """What talks to the model does so as to OpenAI's API."""
        return bool(self.agent or self.verifiers)


@dataclass
class SamplingConfig:
    """How responses are drawn. Settings after `max_response_tokens` bend the behaviour distribution and are
    refused for training."""

    temperature: float = number(1.0, above=0, at_most=100)
    """of the softmax over next tokens"""
    max_response_tokens: int = number(256, at_least=1)
    """a response is cut here; of all its turns together, with what tools gave"""
    top_p: float = number(1.0)
    """refused for training unless 1.0"""
    top_k: int = number(-1)
    """refused for training unless -1"""
    min_p: float = number(0.0)
    """refused for training unless 0.0"""
    frequency_penalty: float = number(0.0)
    """refused for training unless 0.0"""
    presence_penalty: float = number(0.0)
    """refused for training unless 0.0"""
    repetition_penalty: float = number(1.0)
    """refused for training unless 1.0"""


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
    corrections: list[str] = field(default_factory=list, metadata=choices_or_paths(objectives.CORRECTIONS))
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
    routing_replay: Any = field(default="auto", metadata=choices("auto", "true", "false"))
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
    """On-policy distillation: what teachers say of the tokens that the policy has drawn, as an advantage of
    each token; docs/algorithms.md has the formula."""

    model: Any = ""
    """a Hugging Face directory of the policy's architecture, held on the trainer ranks; or the URL
    http(s)://HOST:PORT of an SGLang or vLLM server; or several, written {NAME: MODEL}, one of which each row
    names in its field `teacher`; empty = none"""
    coefficient: float = number(1.0, above=0, at_most=1000)
    """weight of the teacher's log-prob less the policy's in a token's advantage"""
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
    """whether there is one"""
    mismatch_max: float = number(1.0, above=0, at_most=100)
    """in nats: a trajectory whose mean |log-prob by the trainer - by the engine| is above is left out,
    whatever is usual in the run"""
    ratio_max: float = number(1000.0, above=1, at_most=1e30)
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


@dataclass
class RunConfig:
    run_dir: str = "runs/default"
    """folder of the run: metrics, traces, store, checkpoints, report"""
    seed: int = number(0, at_least=0)
    """of the order of prompts, the mini-batches and the shuffled rewards; the engines' seeds follow from it
    """
    steps: int = number(60, at_least=1)
    """trainer steps in all, also over a resume"""
    resume: str = choice("auto", "never", default="never")
    """auto: go on from run_dir's newest checkpoint; never: an earlier run there is moved aside"""
    restarts: int | None = number(None, at_least=0)
    """times per hour that `laminar train` starts the run again after a death, and launch/controller.sh and
    launch/trainer.sh their role; 0 = never; null = 0 for `laminar train`, 10 for the scripts"""
    source: str = "rollout"
    """rollout | replay:RUN_DIR (train again from that run's store)"""
    store_dir: str = ""
    """of the SQLite store, on a local disk of the controller's machine; its journal is in run_dir; empty = no
    journal, and the store is in run_dir"""
    archive: str = "all"
    """which trained steps keep their responses, as a Parquet file each: all, last:N or every:N"""
    role: str = choice("all", "trainer", "relay", "rollout", "controller")
    """which role the processes of this start have; all = by their ranks, in one world"""
    first_index: int = number(0, at_least=0, at_most=RANKS_MAX)
    """of trainers and relays with roles apart: index within the role of its first rank"""
    dry_run: bool = False
    """print the derived quantities and stop"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    @property
    def brings_rows(self) -> bool:
        """The environment has the training prompts."""
        return bool(self.environment.verifiers and not self.data.train)
