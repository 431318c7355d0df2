"""Every setting of a run, as dataclasses, one per component. `conf/` holds their values; this file holds their types, units and defaults.

Read by `config.load.load_config`, which merges `conf/` with the command line and refuses unknown keys. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The policy: a Hugging Face directory (config.json, *.safetensors, tokenizer.json)."""

    path: str = ""
    dtype: str = "float32"  # of the served weights: float32 | bfloat16
    float32_head: bool = True  # of bfloat16: trainer and engine do not round the logits to it


@dataclass
class DataConfig:
    """Prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset as OWNER/NAME[:SUBSET][@SPLIT]; see docs/data.md."""

    train: str = ""
    prompt_field: str = "prompt"  # a text or chat messages; `a.b` is a field within a field, `a|b` the first that a row has
    answer_field: str = ""  # given to the reward as row["answer"]; empty = rows as they are
    chat_template: bool = False  # render prompts with the model's chat template; false = text as it is
    max_prompt_tokens: int | None = None  # null = what fits beside a response
    too_long: str = "refuse"  # a prompt with more tokens: refuse the file, or drop the row and count it
    drop_duplicates: bool = False  # rows with the same prompt and answer count once
    shuffle: bool = True  # a new order per pass over the rows, by run.seed


@dataclass
class RewardFunction:
    """One of `reward.functions`: a Python function or a reward model behind a URL, and its weight in the sum."""

    function: str = ""  # dotted path; or else a url
    url: str = ""  # http(s)://HOST:PORT/PATH of a reward model
    weight: float = 1.0
    style: str = "laminar"  # of a function: laminar | trl | verl; of a URL: laminar | sglang (its /classify)
    api_key_env: str = ""  # of a URL: the environment variable that holds its key, sent as a bearer token


@dataclass
class RewardConfig:
    """The reward: `function`, or the weighted sum of `functions`, called in processes of each rollout rank; see rewards.md."""

    function: str = ""  # dotted path, plain or async; returns a float or a dict with "reward" and named parts
    style: str = "laminar"  # laminar | trl | verl: functions written for the latter two run unchanged
    functions: dict[str, Any] = field(default_factory=dict)  # several by name, in place of function
    workers: int = 1  # processes per rollout rank; more while calls wait, hang or compute for long
    slots: int = 64  # calls in flight per rollout rank; each call of a plain function is in a process of its own
    timeout_seconds: float = 10.0
    score_on_failure: float = 0.0  # in place of a reward whose call raised, hung or returned something else


@dataclass
class SamplingConfig:
    """How responses are drawn. Settings after `max_response_tokens` bend the behaviour distribution and are refused for training."""

    temperature: float = 1.0
    max_response_tokens: int = 256
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass
class AlgorithmConfig:
    """How a batch becomes an update; docs/algorithms.md has formulas and sources. Default: GRPO with clip-higher, mean over all tokens."""

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    first_samples: int | None = None  # so many at first, then more_samples at a time while all are wrong; null = all at once
    more_samples: int = 2
    zero_variance: str = "keep"  # groups whose rewards are all equal: keep, filter (draw other prompts), or estimate (AERO's mean)
    minibatches_per_step: int = 2  # optimizer updates per trainer step
    advantage: str = "grpo"  # grpo | rloo | reinforce_pp | reinforce_pp_baseline
    normalize_std: bool = True  # of grpo only
    loss: str = "clip"  # clip | gspo | cispo | aipo
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = None  # of clip: no ratio above it counts for a negative advantage (dual clip); null = none
    denominator: str = "tokens"  # loss per: tokens | sequences | constant (sequences x sampling.max_response_tokens)
    proximal: str = "behaviour"  # ratios are taken to: behaviour (the engine's log-probs) | recomputed (at the start of the step)
    weight_max: float | None = None  # truncation of importance weights: proximal/behaviour if recomputed, current/behaviour of aipo
    sequence_ratio_min: float | None = None  # a trajectory is left out if its ratios' geometric mean is below; null = no bound
    sequence_ratio_max: float | None = None  # the same, above
    kl_coefficient: float = 0.0  # weight of the KL divergence from the model of model.path, of which a copy is then held; 0 = none
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_in_reward: bool = False  # taken off the reward instead of added to the loss
    overlong_buffer_tokens: int = 0  # the last so many below sampling.max_response_tokens cost up to 1 of reward; 0 = none
    shuffle_rewards: bool = False  # negative control: rewards are permuted over the batch, so there is nothing to learn


@dataclass
class OptimizerConfig:
    lr: float = 1e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    warmup_steps: int = 0
    max_skipped_updates: int = 5  # non-finite gradients in a row before the run ends


@dataclass
class TrainerConfig:
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    tokens_per_microbatch: int = 4096  # packed; a longer trajectory is refused at start-up
    distributed_optimizer: bool = False  # its state is split over the data-parallel ranks
    devices: list[int] | None = None  # GPUs of each machine that trainer ranks use, one each in order; null = the first ones
    recompute_activations: bool = False  # keep each layer's input only and compute the layer anew in the backward pass: less memory
    threads: int = 1  # CPU threads per rank


@dataclass
class RelayConfig:
    lanes: int = 1  # relay ranks per rollout machine: a publication leaves the trainers as so many streams, each over a link of its own
    slots: int = 3
    shm_dir: str = "/dev/shm"
    publish: str = "overlapped"  # the trainer goes on while its weights are read, until the next update; blocking: it stands still
    chunk_megabytes: int = 64
    publish_timeout_seconds: float = 60.0
    delta: str = "off"  # auto: send what changed where that is less; those who send keep a copy of the weights in host memory for it
    anchor_every: int = 20
    threads: int = 1


@dataclass
class RolloutConfig:
    replicas: int = 1
    tensor_parallel: int = 1
    max_concurrent: int = 256  # requests in flight per replica
    kv_cache_tokens: int = 65536
    engine_start_seconds: float = 180.0
    request_timeout_seconds: float = 600.0
    threads: int = 1  # CPU threads per engine
    devices: list[int] | None = None  # GPUs of each machine that replicas use, in order; null = those after the trainers', or all
    engine_arguments: dict[str, str] = field(default_factory=dict)  # passed to SGLang's server as --key value
    engine: str = "sglang"  # sglang | emulated (no model at all, see `emulation`)
    increment_tokens: int = 0  # responses go to the partial-response pool every so many tokens and outlive their replica; 0 = never


@dataclass
class EmulationConfig:
    """The emulated engine (rollout.engine=emulated): no model and no weights, invented tokens, decode and moves paced by the simulator's
    costs, real processes, sockets and messages."""

    time_scale: float = 1.0  # emulated seconds per second
    model: str = "32B"  # whose costs, by simulator/constants.py
    gpu: str = "H800"  # the same
    median_response_tokens: float = 1097.0  # lengths are log-normal, similar inside a group, at most sampling.max_response_tokens
    sigma: float = 1.69  # of the log-lengths
    wire_share: float = 1.0  # of a KV cache's bytes that really cross the socket; all of them are charged
    constants: dict[str, float] = field(default_factory=dict)  # other values for fields of simulator/constants.py


@dataclass
class PipelineConfig:
    """A pipeline is a few policy values; `conf/pipeline/*.yaml` are presets of them."""

    name: str = "laminar"
    refresh: str = "drained"  # drained: a replica pulls when its local batch is done; barrier: all together; interrupt: at once
    max_staleness: int | None = 2  # in trainer steps at training time; null = no bound, first finished first trained
    consumption: str = "batch"  # batch: the trainer takes a whole batch; stream: each mini-batch as soon as its groups are finished
    local_batch_groups: int | None = None  # prompt groups per local batch; null = ceil(prompts_per_step / replicas)
    keep_kv: bool = False  # of interrupt: go on with the KV cache of the earlier weights; false = prefill again
    repack: str = "off"  # the tail of a local batch moves to another replica on the same weights: off | reprefill | kv
    repack_seconds: float = 5.0  # between two looks at the replicas; there is one more after each publication
    repack_requests: int | None = None  # most requests that a replica is filled to; null = from its measured decode curve


@dataclass
class EvaluationConfig:
    """Accuracy on held-out rows: greedy (pass@1) and sampled at the training temperature (mean@k), each a local batch on one weight id."""

    files: list[str] = field(default_factory=list)  # named as data.train; the first is that of accuracy_before and _after; [] = none
    problems: int | None = None  # the first so many of each file; null = all
    samples: int = 1  # responses per problem of the sampled evaluation (k); 0 = greedy only
    every: int = 0  # trainer steps between evaluations on the way; 0 = before and after only


@dataclass
class CheckpointConfig:
    every: int = 20  # trainer steps; the last step is always checkpointed
    keep: int = 2


@dataclass
class ClusterConfig:
    host: str = "127.0.0.1"  # address at which the controller listens and others reach this run
    port: int = 0  # 0 = any free port
    join_timeout_seconds: float = 300.0  # for all ranks to be there
    heartbeat_timeout_seconds: float = 10.0
    batch_timeout_seconds: float = 900.0  # a trainer's longest wait for a batch
    stop_timeout_seconds: float = 60.0


@dataclass
class ObservabilityConfig:
    """Where the controller mirrors metrics besides the run directory. Everything in docs/observing.md works without it."""

    wandb: str = "off"  # off | offline (files under run_dir/wandb) | online (needs `wandb login` or WANDB_API_KEY)
    wandb_project: str = "laminar"


@dataclass
class RunConfig:
    run_dir: str = "runs/default"
    seed: int = 0
    steps: int = 60  # trainer steps in all, also over a resume
    resume: str = "never"  # auto: go on from run_dir's newest checkpoint; never: an earlier run there is moved aside
    source: str = "rollout"  # rollout | replay:RUN_DIR (train again from that run's store)
    store_dir: str = ""  # of the SQLite store, on a local disk of the controller's machine; empty = run_dir
    role: str = "all"  # all | trainer | relay | rollout | controller
    first_index: int = 0  # with a torchrun per role: index within the role of its first rank
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
