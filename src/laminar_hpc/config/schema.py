"""Every setting of a run, as dataclasses, one per component. `conf/` holds their values; this file holds
their types, units and defaults.

A number stands with its bounds, a word with its choices (see bounds.py); `config.load.load_config` refuses
what is outside. The comment behind a key, or above it, is its meaning in docs/configuration.md. Imports no
torch.
"""

from dataclasses import dataclass, field
from typing import Any

from laminar_hpc.config.bounds import bounds, choice, number, seconds

RENAMED = {  # keys of earlier versions: refused with the new name; read where a finished run's file has them
    "algorithm.denominator": "algorithm.loss_aggregation",
    "algorithm.weight_max": "algorithm.importance_weight_cap",
    "relay.anchor_every": "relay.full_every",
}
_MOST_RANKS = 65_536  # a larger number of processes is a typing error
_MOST_THREADS = 1024


@dataclass
class ModelConfig:
    """The policy: a Hugging Face directory (config.json, *.safetensors, tokenizer.json), or
    OWNER/NAME[@REVISION] of the hub; see docs/models.md."""

    path: str = ""
    dtype: str = choice("float32", "bfloat16")  # of the served weights
    float32_head: bool = True  # of bfloat16: trainer and engine do not round the logits to it


@dataclass
class DataConfig:
    """Prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset as OWNER/NAME[:SUBSET][@SPLIT];
    see docs/data.md."""

    train: str = ""
    # a text or chat messages; `a.b` is a field within a field, `a|b` the first that a row has
    prompt_field: str = "prompt"
    answer_field: str = ""  # given to the reward as row["answer"]; empty = rows as they are
    chat_template: bool = False  # render prompts with the model's chat template; false = text as it is
    max_prompt_tokens: int | None = number(None, at_least=1)  # null = what fits beside a response
    # a prompt with more tokens: refuse the file, or drop the row and count it
    too_long: str = choice("refuse", "drop")
    drop_duplicates: bool = False  # rows with the same prompt and answer count once
    shuffle: bool = True  # a new order per pass over the rows, by run.seed


@dataclass
class RewardFunction:
    """One of `reward.functions`: a Python function or a reward model behind a URL, and its weight in the
    sum."""

    function: str = ""  # dotted path; or else a url
    url: str = ""  # http(s)://HOST:PORT/PATH of a reward model
    weight: float = 1.0
    style: str = "laminar"  # of a function: laminar | trl | verl; of a URL: laminar | sglang (its /classify)
    api_key_env: str = ""  # of a URL: the environment variable that holds its key, sent as a bearer token


@dataclass
class RewardConfig:
    """The reward: `function`, or the weighted sum of `functions`, called in processes of each rollout rank;
    see rewards.md."""

    function: str = ""  # dotted path, plain or async; returns a float or a dict with "reward" and named parts
    style: str = choice("laminar", "trl", "verl")  # functions written for the latter two run unchanged
    functions: dict[str, Any] = field(default_factory=dict)  # several by name, in place of function
    # processes per rollout rank; more while calls wait, hang or compute for long
    workers: int = number(1, at_least=1, at_most=_MOST_THREADS)
    # calls in flight per rollout rank; each call of a plain function is in a process of its own
    slots: int = number(64, at_least=1)
    timeout_seconds: float = seconds(10.0)
    # in place of a reward whose call raised, hung or returned something else
    score_on_failure: float = number(0.0, at_least=-1_000_000, at_most=1_000_000)


@dataclass
class SamplingConfig:
    """How responses are drawn. Settings after `max_response_tokens` bend the behaviour distribution and are
    refused for training."""

    temperature: float = number(1.0, above=0, at_most=100)
    max_response_tokens: int = number(256, at_least=1)
    top_p: float = number(1.0)
    top_k: int = number(-1)
    min_p: float = number(0.0)
    frequency_penalty: float = number(0.0)
    presence_penalty: float = number(0.0)
    repetition_penalty: float = number(1.0)


@dataclass
class AlgorithmConfig:
    """How a batch becomes an update; docs/algorithms.md has formulas and sources. Default: GRPO with
    clip-higher, mean over all tokens."""

    prompts_per_step: int = number(32, at_least=1)
    samples_per_prompt: int = number(8, at_least=2)
    # so many at first, then more_samples at a time while all are wrong; null = all at once
    first_samples: int | None = number(None, at_least=2)
    more_samples: int = number(2, at_least=1)
    # groups whose rewards are all equal: keep, filter (draw other prompts), or estimate (AERO's mean)
    zero_variance: str = choice("keep", "filter", "estimate")
    minibatches_per_step: int = number(2, at_least=1)  # optimizer updates per trainer step
    advantage: str = choice("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    normalize_std: bool = True  # of grpo only
    loss: str = choice("clip", "gspo", "cispo", "aipo")
    clip_low: float = number(0.2, at_least=0, at_most=1)
    clip_high: float = number(0.28, at_least=0)
    # of clip: no ratio above it counts for a negative advantage (dual clip); null = none
    clip_dual: float | None = number(None, above=1)
    # loss per: tokens, sequences, or constant (sequences x sampling.max_response_tokens)
    loss_aggregation: str = choice("tokens", "sequences", "constant")
    # ratios are taken to: behaviour (the engine's log-probs) or recomputed (at the start of the step)
    proximal: str = choice("behaviour", "recomputed")
    # truncation of importance weights: proximal/behaviour if recomputed, current/behaviour of aipo
    importance_weight_cap: float | None = number(None, above=0)
    # a trajectory is left out if its ratios' geometric mean is below; null = no bound
    sequence_ratio_min: float | None = number(None, at_least=0)
    sequence_ratio_max: float | None = number(None, above=0)  # the same, above
    # weight of the KL divergence from the model of model.path, of which a copy is then held; 0 = none
    kl_coefficient: float = number(0.0, at_least=0)
    kl_estimator: str = choice("k1", "k2", "k3", default="k3")
    kl_in_reward: bool = False  # taken off the reward instead of added to the loss
    # the last so many below sampling.max_response_tokens cost up to 1 of reward; 0 = none
    overlong_buffer_tokens: int = number(0, at_least=0)
    # negative control: rewards are permuted over the batch, so there is nothing to learn
    shuffle_rewards: bool = False


@dataclass
class OptimizerConfig:
    lr: float = number(1e-4, above=0, at_most=1)
    weight_decay: float = number(0.0, at_least=0, at_most=1)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.95, at_least=0, below=1)
    eps: float = number(1e-8, above=0, at_most=1)
    clip_grad: float = number(1.0, at_least=0)  # 0 = no clipping
    warmup_steps: int = number(0, at_least=0)
    max_skipped_updates: int = number(5, at_least=0)  # non-finite gradients in a row before the run ends


@dataclass
class TrainerConfig:
    tensor_parallel: int = number(1, at_least=1, at_most=_MOST_RANKS)
    pipeline_parallel: int = number(1, at_least=1, at_most=_MOST_RANKS)
    data_parallel: int = number(1, at_least=1, at_most=_MOST_RANKS)
    # packed; a longer trajectory is refused at start-up
    tokens_per_microbatch: int = number(4096, at_least=1)
    distributed_optimizer: bool = False  # its state is split over the data-parallel ranks
    # GPUs of each machine that trainer ranks use, one each in order; null = the first ones
    devices: list[int] | None = field(default=None, metadata=bounds(at_least=0))
    # keep each layer's input only and compute the layer anew in the backward pass: less memory
    recompute_activations: bool = False
    threads: int = number(1, at_least=1, at_most=_MOST_THREADS)  # CPU threads per rank
    # of each GPU, 10^9 bytes; what cannot fit is refused; null = this machine's, if it has any
    gpu_memory_gigabytes: float | None = number(None, above=0, at_most=100_000)


@dataclass
class RelayConfig:
    # relay ranks per rollout machine; a publication is sent as this many streams, each over its own link
    lanes: int = number(1, at_least=1, at_most=64)
    slots: int = number(3, at_least=2, at_most=64)
    shm_dir: str = "/dev/shm"
    # the trainer goes on while its weights are read, until the next update; blocking: it stands still
    publish: str = choice("overlapped", "blocking")
    chunk_megabytes: int = number(64, at_least=1, at_most=65_536)
    publish_timeout_seconds: float = seconds(60.0)
    # auto: send only what changed where that is smaller; senders then keep a copy of the weights in host
    # memory
    delta: str = choice("off", "auto")
    full_every: int = number(20, at_least=1)
    threads: int = number(1, at_least=1, at_most=_MOST_THREADS)


@dataclass
class RolloutConfig:
    replicas: int = number(1, at_least=1, at_most=_MOST_RANKS)
    tensor_parallel: int = number(1, at_least=1, at_most=_MOST_RANKS)
    max_concurrent: int = number(256, at_least=1)  # requests in flight per replica
    kv_cache_tokens: int = number(65536, at_least=1)
    engine_start_seconds: float = seconds(180.0)
    request_timeout_seconds: float = seconds(600.0)
    threads: int = number(1, at_least=1, at_most=_MOST_THREADS)  # CPU threads per engine
    # GPUs of each machine that replicas use, in order; null = those after the trainers', or all
    devices: list[int] | None = field(default=None, metadata=bounds(at_least=0))
    engine_arguments: dict[str, str] = field(default_factory=dict)  # passed to SGLang's server as --key value
    engine: str = choice("sglang", "emulated")  # emulated: no model at all, see `emulation`
    # as trainer.gpu_memory_gigabytes, for the engines' GPUs
    gpu_memory_gigabytes: float | None = number(None, above=0, at_most=100_000)
    # responses go to the partial-response pool every so many tokens and outlive their replica; 0 = never
    increment_tokens: int = number(0, at_least=0)


@dataclass
class EmulationConfig:
    """The emulated engine (rollout.engine=emulated): no model and no weights, invented tokens, decode and
    moves paced by the simulator's costs, real processes, sockets and messages."""

    time_scale: float = number(1.0, above=0)  # emulated seconds per second
    model: str = choice("7B", "32B", "72B", default="32B")  # whose costs, by simulator/constants.py
    gpu: str = choice("H800", "H100", "H20", "A100", "L40S")  # the same
    # lengths are log-normal, similar inside a group, at most sampling.max_response_tokens
    median_response_tokens: float = number(1097.0, at_least=1)
    sigma: float = number(1.69, at_least=0, at_most=10)  # of the log-lengths
    # of a KV cache's bytes that really cross the socket; all of them are charged
    wire_share: float = number(1.0, at_least=0, at_most=1)
    # other values for fields of simulator/constants.py
    constants: dict[str, float] = field(default_factory=dict, metadata=bounds(at_least=0))


@dataclass
class PipelineConfig:
    """A pipeline is a few policy values; `conf/pipeline/*.yaml` are presets of them."""

    name: str = "laminar"
    # drained: a replica pulls when its local batch is done; barrier: all together; interrupt: at once
    refresh: str = choice("drained", "barrier", "interrupt")
    # in trainer steps at training time; null = no bound, first finished first trained
    max_staleness: int | None = number(2, at_least=0)
    # batch: the trainer takes a whole batch; stream: each mini-batch as soon as its groups are finished
    consumption: str = choice("batch", "stream")
    # prompt groups per local batch; null = ceil(prompts_per_step / replicas)
    local_batch_groups: int | None = number(None, at_least=1)
    # of interrupt: go on with the KV cache of the earlier weights; false = prefill again
    keep_kv: bool = False
    # the tail of a local batch moves to another replica on the same weights, with its KV cache (kv) or
    # without (reprefill)
    repack: str = choice("off", "reprefill", "kv")
    # between two looks at the replicas; there is one more after each publication
    repack_seconds: float = seconds(5.0)
    # most requests that a replica is filled to; null = from its measured decode curve
    repack_requests: int | None = number(None, at_least=1)


@dataclass
class EvaluationConfig:
    """Accuracy on held-out rows: greedy (pass@1) and sampled at the training temperature (mean@k), each a
    local batch on one weight id."""

    # named as data.train; the first is that of accuracy_before and _after; [] = none
    files: list[str] = field(default_factory=list)
    problems: int | None = number(None, at_least=1)  # the first so many of each file; null = all
    # responses per problem of the sampled evaluation (k); 0 = greedy only
    samples: int = number(1, at_least=0)
    # trainer steps between evaluations on the way; 0 = before and after only
    every: int = number(0, at_least=0)


@dataclass
class CheckpointConfig:
    every: int = number(20, at_least=1)  # trainer steps; the last step is always checkpointed
    keep: int = number(2, at_least=1)


@dataclass
class ClusterConfig:
    host: str = "127.0.0.1"  # address at which the controller listens and others reach this run
    port: int = number(0, at_least=0, at_most=65_535)  # 0 = any free port
    join_timeout_seconds: float = seconds(300.0)  # for all ranks to be there
    heartbeat_timeout_seconds: float = seconds(10.0)
    batch_timeout_seconds: float = seconds(900.0)  # a trainer's longest wait for a batch
    stop_timeout_seconds: float = seconds(60.0)


@dataclass
class ObservabilityConfig:
    """What a run shows besides its run directory. Everything in docs/observing.md works without it."""

    # responses on the console after each step, with reward and staleness; 0 = none
    show_samples: int = number(0, at_least=0, at_most=100)
    # offline: files under run_dir/wandb; online: needs `wandb login` or WANDB_API_KEY
    wandb: str = choice("off", "offline", "online")
    wandb_project: str = "laminar"


@dataclass
class RunConfig:
    run_dir: str = "runs/default"
    seed: int = number(0, at_least=0)
    steps: int = number(60, at_least=1)  # trainer steps in all, also over a resume
    # auto: go on from run_dir's newest checkpoint; never: an earlier run there is moved aside
    resume: str = choice("auto", "never", default="never")
    # times per hour that `laminar train` starts the run again after a death; 0 = never
    restarts: int = number(0, at_least=0)
    source: str = "rollout"  # rollout | replay:RUN_DIR (train again from that run's store)
    store_dir: str = ""  # of the SQLite store, on a local disk of the controller's machine; empty = run_dir
    role: str = choice("all", "trainer", "relay", "rollout", "controller")  # what this torchrun starts
    # with a torchrun per role: index within the role of its first rank
    first_index: int = number(0, at_least=0, at_most=_MOST_RANKS)
    dry_run: bool = False  # print the derived quantities and stop
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
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
