"""Every setting of a run, as dataclasses, one per component; those of the running system are in
system_schema.py. `conf/` holds their values, these files their types, units and defaults.

A number stands with its bounds, a word with its choices (see bounds.py); `config.load.load_config` refuses
what is outside. The text below a key is its meaning in docs/configuration.md. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from laminar_hpc.config.bounds import choice, number, seconds
from laminar_hpc.config.learning_schema import (
    AlgorithmConfig,
    CriticConfig,
    DemonstrationsConfig,
    GuardConfig,
    OptimizerConfig,
    TeacherConfig,
)
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
    trained instead of the model's weights, which stay fixed; see docs/models.md."""

    rank: int = number(0, at_least=0, at_most=LORA_RANK_MAX)
    """rank of the adapters; 0 = no adapter, all weights are trained"""
    alpha: float = number(32.0, above=0, at_most=100_000)
    """an adapter's product is multiplied by alpha / rank"""
    targets: str = choice("all", "attention", "mlp")
    """linear layers with an adapter: attention (q, k, v, o), mlp (gate, up, down) or all seven"""
    init: str = choice("kaiming", "gaussian")
    """initial values of the matrix A; B starts at 0, so a new adapter changes nothing. kaiming: uniform
    within 1 / sqrt(inputs); gaussian: with standard deviation 1 / rank"""
    path: str = ""
    """directory of an adapter to continue from, as PEFT writes it; empty = a new one"""


@dataclass
class ModelConfig:
    """The policy: a Hugging Face directory (config.json, *.safetensors, tokenizer.json), or
    OWNER/NAME[@REVISION] on the hub; see docs/models.md."""

    path: str = ""
    """Hugging Face directory of the model to train, or OWNER/NAME[@REVISION] on the hub; see models.md"""
    dtype: str = choice("float32", "bfloat16")
    """dtype of the weights in trainer and engine; the optimizer keeps its own in float32"""
    float32_head: bool = True
    """with bfloat16: trainer and engine keep the logits in float32"""
    lora: LoraConfig = field(default_factory=LoraConfig)
    deterministic: bool = False
    """trainer and engines give the same bits for the same work, so two runs with pipeline=sync have the same
    weights; see docs/determinism.md for the cost"""


@dataclass
class DataConfig:
    """Prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset; see docs/data.md."""

    train: str = ""
    """the training prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset as
    OWNER/NAME[:SUBSET][@SPLIT]"""
    prompt_field: str = "prompt"
    """field of a row that holds the prompt: a text or chat messages; `a.b` is a field within a field, `a|b`
    the first that a row has"""
    answer_field: str = ""
    """field of a row that holds the correct answer, passed to the reward as row["answer"]; empty = rows as
    they are"""
    chat_template: bool = False
    """render prompts with the model's chat template; false = use the text as it is"""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """variables of the chat template, such as {enable_thinking: false}; also continue_final_message: true if
    the response continues a prompt's final assistant message"""
    system_prompt: str = ""
    """system message for prompts that have none; with the chat template"""
    max_prompt_tokens: int | None = number(None, at_least=1)
    """maximum prompt length; null = what fits beside a response"""
    too_long: str = choice("refuse", "drop")
    """for a prompt with more tokens: refuse the file, or drop the row and count it"""
    drop_duplicates: bool = False
    """rows with the same prompt and answer count once"""
    shuffle: bool = True
    """a new order for each epoch, from the seed"""


@dataclass
class RewardFunction:
    """One of `reward.functions`: a Python function or a reward model behind a URL, and its weight."""

    function: str = ""
    """dotted path of a function; or set url"""
    url: str = ""
    """http(s)://HOST:PORT/PATH of a reward model"""
    weight: float = 1.0
    style: str = "laminar"
    """for a function: laminar | trl | verl; for a URL: laminar | sglang (its /classify)"""
    api_key_env: str = ""
    """for a URL: the environment variable that holds its key, sent as a bearer token"""


@dataclass
class RewardConfig:
    """The reward: `function`, or the weighted sum of `functions`, in processes of each rollout rank."""

    function: str = ""
    """dotted path, plain or async; returns a float or a dict with "reward" and named parts"""
    style: str = choice("laminar", "trl", "verl")
    """functions written for the latter two run unchanged"""
    functions: dict[str, Any] = field(default_factory=dict)
    """several functions by name, instead of `function`"""
    workers: int = number(1, at_least=1, at_most=THREADS_MAX)
    """processes per rollout rank; more while calls wait, hang or compute for long"""
    slots: int = number(64, at_least=1)
    """calls in flight per rollout rank; each call of a plain function is in a process of its own"""
    timeout_seconds: float = seconds(10.0)
    """time limit of one call; then the trajectory gets `reward.score_on_failure`"""
    score_on_failure: float = number(0.0, at_least=-1_000_000, at_most=1_000_000)
    """the reward if the call raised, hung or returned an invalid value"""


@dataclass
class EnvironmentConfig:
    """Multi-turn responses with tools, called in processes of each rollout rank; see environments.md. Set one
    of `factory`, `tools`, `agent` or `verifiers`; with none of them a response is one turn."""

    factory: Any = ""
    """dotted path of a class (TRL's contract): reset(**row), public methods as tools, get_reward(); or
    several as {NAME: PATH}, one of which each row names in its field `environment`"""
    tools: list[str] = field(default_factory=list)
    """dotted paths of functions that the model may call; the reward comes from `reward`"""
    agent: str = ""
    """dotted path of run(row, base_url, api_key, model), which talks to the model through OpenAI's API"""
    verifiers: Any = ""
    """a taskset of the verifiers package, under environment.python: its id, or verifiers' own [env] table"""
    python: str = ""
    """interpreter for the four keys above, if their packages conflict with ours, such as
    /path/.venv/bin/python: Python 3.11 or newer with msgspec and pydantic; empty = ours"""
    max_turns: int = number(8, at_least=1)
    """maximum number of the model's answers in one trajectory"""
    max_tool_calls: int = number(16, at_least=1)
    """maximum number of tool calls in one trajectory"""
    history: str = choice("refuse", "keep", "branch")
    """when the chat template or an agent rewrites earlier turns: refuse it; keep the sampled tokens (for the
    template's rewriting only); or branch: the rewritten history starts another sequence of the trajectory"""
    timeout_seconds: float = seconds(30.0)
    """time limit of one reset, tool call or get_reward, and of the pause between two requests of an agent"""
    max_seconds: float = seconds(600.0)
    """a trajectory that takes longer ends after its current turn, and is graded as it stands"""

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
    """How responses are sampled. Settings after `max_response_tokens` change the behaviour distribution and
    are refused for training."""

    temperature: float = number(1.0, above=0, at_most=100)
    """temperature of the softmax over next tokens"""
    max_response_tokens: int = number(256, at_least=1)
    """maximum response length; covers all turns together, tool results included"""
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
class RunConfig:
    run_dir: str = "runs/default"
    """folder of the run: metrics, traces, store, checkpoints, report"""
    seed: int = number(0, at_least=0)
    """seed for the order of prompts, the mini-batches and the shuffled rewards; the engines' seeds derive
    from it"""
    steps: int = number(60, at_least=1)
    """total number of trainer steps, including those before a resume"""
    resume: str = choice("auto", "never", default="never")
    """auto: resume from run_dir's newest checkpoint; never: move an earlier run there aside"""
    restarts: int | None = number(None, at_least=0)
    """how often per hour `laminar train` restarts the run after a death, and launch/controller.sh and
    launch/trainer.sh their role; 0 = never; null = 0 for `laminar train`, 10 for the scripts"""
    source: str = "rollout"
    """rollout | replay:RUN_DIR (train again on that run's stored trajectories)"""
    store_dir: str = ""
    """folder of the SQLite store, on a local disk of the controller's machine; its journal is in run_dir;
    empty = no journal, and the store is in run_dir"""
    archive: str = "all"
    """which trained steps keep their responses, in one Parquet file each: all, last:N or every:N"""
    role: str = choice("all", "trainer", "relay", "rollout", "controller")
    """role of the processes of this start; all = by rank, in one world"""
    first_index: int = number(0, at_least=0, at_most=RANKS_MAX)
    """for trainers and relays with roles apart: index of the first rank within its role"""
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
