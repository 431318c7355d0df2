"""The settings of the running system: trainer, relays, rollouts, pipeline, cluster; part of schema.py, which
says how to read them. Imports no torch."""

from dataclasses import dataclass, field

from laminar_hpc.config.bounds import bounds, choice, number, seconds

RANKS_MAX = 65_536  # a larger number of processes is a typing error
THREADS_MAX = 1024
_AUTO_STALENESS_MAX = 8  # of pipeline.max_staleness=auto: more than any setting on docs/staleness.md needs


@dataclass
class TrainerConfig:
    tensor_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """ranks over which every layer is split; must divide the model's heads, key-value heads and feed-forward
    width"""
    pipeline_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """stages of consecutive layers; at most the number of layers"""
    context_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """ranks over which the tokens of every micro-batch are split; the product with tensor_parallel must
    divide the model's heads"""
    virtual_stages: int = number(1, at_least=1, at_most=1024)
    """chunks of layers in each pipeline stage, run in turns: the pipeline idles that many times less and
    keeps more activations; the product with pipeline_parallel must divide the number of layers"""
    data_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """replicas of the trainer (tensor_parallel x context_parallel x pipeline_parallel ranks); each takes its
    share of every batch"""
    expert_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """ranks, out of the tensor_parallel x context_parallel x data_parallel ranks of a stage, over which whole
    experts are divided; with 1 each expert is split over the tensor-parallel ranks like other layers"""
    tokens_per_microbatch: int = number(4096, at_least=1)
    """packed tokens on each context-parallel rank; a trajectory longer than their sum is refused at
    start-up"""
    distributed_optimizer: bool = False
    """Megatron's distributed optimizer; its state is sharded over the data-parallel ranks"""
    devices: list[int] | None = field(default=None, metadata=bounds(at_least=0))
    """GPUs of each machine for trainer ranks, one each in order; null = the first ones"""
    recompute_activations: str = choice("auto", "none", "selective", "full")
    """what the backward pass recomputes instead of keeping. selective: outputs of norms and activations,
    which needs no matrix product, and experts; full: each layer; auto: the least with which the memory
    estimate fits the GPU, none if its memory is unknown"""
    threads: int = number(1, at_least=1, at_most=THREADS_MAX)
    """CPU threads per rank"""
    gpu_memory_gigabytes: float | None = number(None, above=0, at_most=100_000)
    """memory of each GPU, in 10^9 bytes; what cannot fit is refused; null = that of this machine's GPUs, if
    any"""

    @property
    def replica_ranks(self) -> int:
        """The ranks that hold one copy of the model, or share its micro-batches."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def ranks(self) -> int:
        """All trainer ranks."""
        return self.replica_ranks * self.data_parallel

    @property
    def pack_tokens(self) -> int:
        """Tokens of a micro-batch over the context-parallel ranks: the longest trajectory that fits."""
        return self.context_parallel * self.tokens_per_microbatch


@dataclass
class RelayConfig:
    lanes: int = number(1, at_least=1, at_most=64)
    """relay ranks per rollout machine; a publication is sent as this many streams, each over its own link"""
    slots: int = number(3, at_least=2, at_most=64)
    """complete weight versions kept in shared memory per machine"""
    shm_dir: str = "/dev/shm"
    """folder in memory that holds the slots"""
    publish: str = choice("overlapped", "blocking", "copied")
    """how the trainer publishes. overlapped: it continues until its next update while its weights are read;
    copied: it continues through that too, since a copy on its GPU is read; blocking: it waits"""
    chunk_megabytes: int = number(64, at_least=1, at_most=65_536)
    """size of the pieces in which weights are sent; trainer rank 0 has two such buffers on its device"""
    transport: str = choice("auto", "nccl", "host")
    """between trainer and relay, and relay and relay. nccl: between GPUs; host: through host memory; auto:
    nccl between machines that both use a GPU, else host"""
    publish_timeout_seconds: float = seconds(60.0)
    """time limit for one publication to reach a relay"""
    delta: str = choice("off", "auto")
    """auto: send only the changes if that is smaller; senders then keep a copy of the weights in host
    memory"""
    full_every: int = number(20, at_least=1)
    """with delta=auto one publication in this many is sent in full, whatever has changed; 1 = all"""
    threads: int = number(1, at_least=1, at_most=THREADS_MAX)
    """CPU threads of a relay process"""
    gate: str = ""
    """[HOST:]PORT at which relays of other places reach the trainer's: its firewall must pass it, and forward
    it to the relay if HOST is not an address of its machine; "" = the relay's own address, any port"""
    parked_gigabytes: float | None = number(None, at_least=0, at_most=100_000)
    """host memory, in 10^9 bytes, in which each relay keeps KV caches of reclaimed replicas until others have
    room; 0 = none; null = a quarter of the memory free at that time"""


@dataclass
class RolloutConfig:
    replicas: int | str = number(1, at_least=1, at_most=RANKS_MAX, span=True)
    """rollout ranks, each with its own engine; with roles apart more may join at any time. MIN:MAX starts
    with MIN, and the run starts and ends others based on its own measurements"""
    replicas_min: int | None = number(None, at_least=1, at_most=RANKS_MAX)
    """with roles apart: number of replicas awaited at the start; null = all"""
    tensor_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """processes per replica that share one copy of the weights; must divide the model's heads"""
    expert_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """how many of these processes divide whole experts; 1 = each expert is split over all of them"""
    max_concurrent: int = number(256, at_least=1)
    """maximum number of requests in flight per replica"""
    kv_cache_tokens: int = number(65536, at_least=1)
    """size of an engine's KV cache"""
    engine_start_seconds: float = seconds(600.0)
    """time limit for an engine to be ready; on a GPU it captures CUDA graphs, and may compile kernels"""
    request_timeout_seconds: float = seconds(600.0)
    """time limit of one generation"""
    threads: int = number(1, at_least=1, at_most=THREADS_MAX)
    """CPU threads per engine"""
    devices: list[int] | None = field(default=None, metadata=bounds(at_least=0))
    """GPUs of each machine for replicas, in order; null = those after the trainers', or all"""
    engine_arguments: dict[str, str] = field(default_factory=dict)
    """passed to SGLang's server as --key value"""
    engine: str = choice("sglang", "emulated")
    """emulated: no model at all, see `emulation`"""
    gpu_memory_gigabytes: float | None = number(None, above=0, at_most=100_000)
    """like trainer.gpu_memory_gigabytes, for the engines' GPUs"""
    increment_tokens: int = number(256, at_least=0)
    """a response is sent to the partial-response pool every so many tokens, so a dying replica loses at most
    that many of each; 0 = never"""
    speculation: str = choice("off", "ngram", "suffix", "auto")
    """tokens are guessed and verified in one pass, which changes no distribution. ngram: from the response's
    own text; suffix: from other responses too; auto: suffix if measurements show that it pays; CPU engines
    only"""

    @property
    def scales(self) -> bool:
        """Whether the run itself starts and ends replicas."""
        return isinstance(self.replicas, str)

    @property
    def fewest(self) -> int:
        """Replicas that there are at least: so many begin."""
        return int(str(self.replicas).partition(":")[0])

    @property
    def most(self) -> int:
        """Replicas that the run itself starts at most."""
        return int(str(self.replicas).rpartition(":")[2])


@dataclass
class EmulationConfig:
    """The emulated engine (rollout.engine=emulated): no model and no weights, invented tokens, decode and
    moves paced by the simulator's costs, real processes, sockets and messages."""

    time_scale: float = number(1.0, above=0)
    """emulated seconds per second"""
    model: str = choice(
        *("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
        *("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"),
        *("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Mistral-7B", "Mistral-Nemo-12B", "Mixtral-8x7B"),
        *("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B"),
        *("GLM-4.5-Air", "DeepSeek-V3", "Kimi-K2", "Moonlight-16B-A3B"),
        *("Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B"),
        default="32B",
    )
    """model whose costs are emulated, from conf/simulation/tables and simulator/constants.py"""
    gpu: str = choice(
        *("H800", "A100", "H100", "H20", "H200", "B200", "GB200"),
        *("L40S", "L4", "A10", "RTX3090", "RTX4090", "MI300X"),
    )
    """GPU whose costs are emulated"""
    tensor_parallel: int | None = number(None, at_least=1, at_most=64)
    """GPUs of a replica; null = the model's own"""
    median_response_tokens: float = number(1097.0, at_least=1)
    """lengths are log-normal, similar within a group, at most sampling.max_response_tokens"""
    sigma: float = number(1.69, at_least=0, at_most=10)
    """standard deviation of the log-lengths"""
    turn_tokens: int = number(0, at_least=0)
    """a response's turns end at multiples of this many tokens, each but the last with `call`; 0 = one turn"""
    call: str = ""
    """the text of a tool call, in the model's own format"""
    wire_share: float = number(1.0, at_least=0, at_most=1)
    """share of a KV cache's bytes that really cross the socket; all of them are charged"""
    constants: dict[str, float] = field(default_factory=dict, metadata=bounds(at_least=0))
    """other values for fields of simulator/constants.py"""


@dataclass
class PipelineConfig:
    """A pipeline is a few policy values; `conf/pipeline/*.yaml` are presets of them."""

    name: str = "laminar"
    """name in logs and reports; has no effect"""
    refresh: str = choice("drained", "barrier", "interrupt", "versions")
    """when replicas take new weights. drained: each when its local batch is done; barrier: all together;
    interrupt: at once; versions: each holds several adapters at once, and each trajectory keeps its own (with
    model.lora.rank)"""
    max_staleness: int | str | None = number(2, at_least=0, word="auto")
    """staleness bound in trainer steps at training time; auto:N = adapts to who waits, at most N; auto =
    auto:8; null = no bound, first finished first trained"""
    consumption: str = choice("batch", "stream")
    """batch: the trainer takes a whole batch; stream: each mini-batch as soon as its groups are finished"""
    local_batch_groups: int | None = number(None, at_least=1)
    """prompt groups per local batch; null = ceil(prompts_per_step / replicas)"""
    dispatch: str = choice("longest_first", "in_order")
    """which prompts of a step go out first. longest_first: from the second epoch on each local batch gets its
    share of the prompts with long responses, and starts with them; in_order: as drawn"""
    keep_kv: bool = False
    """with interrupt: continue with the KV cache of the earlier weights; false = prefill again"""
    repack: str = choice("auto", "off", "reprefill", "kv")
    """move the tail of a local batch to other replicas on the same weights. auto: with its KV cache, if
    caches can move and it frees more seconds than it costs; kv, reprefill: with or without its KV cache,
    whenever it fits"""
    repack_seconds: float = seconds(5.0)
    """interval at which replicas are checked for repack; they are also checked after each publication"""
    repack_requests: int | None = number(None, at_least=1)
    """maximum number of requests to which repack fills a replica; null = from its measured decode curve"""

    @property
    def adapts_staleness(self) -> bool:
        """Whether the bound follows who waits."""
        return isinstance(self.max_staleness, str)

    @property
    def staleness_max(self) -> int | None:
        """The bound, or the maximum of one that adapts; None = no bound."""
        if not isinstance(self.max_staleness, str):
            return self.max_staleness
        return int(self.max_staleness.partition(":")[2] or _AUTO_STALENESS_MAX)

    @property
    def empties(self) -> bool:
        """Repack empties replicas: only one that refreshes by itself gains by it."""
        return self.repack != "off" and self.refresh == "drained"


@dataclass
class EvaluationConfig:
    """Accuracy on held-out rows: greedy (pass@1) and sampled at the training temperature (mean@k), each a
    local batch on one weight id."""

    files: list[str] = field(default_factory=list)
    """written like data.train; accuracy_before and _after refer to the first; [] = none"""
    problems: int | None = number(None, at_least=1)
    """number of problems taken from each file; null = all"""
    samples: int = number(1, at_least=0)
    """responses per problem of the sampled evaluation (k); 0 = greedy only"""
    every: int = number(0, at_least=0)
    """trainer steps between evaluations during training; 0 = before and after only"""


@dataclass
class CheckpointConfig:
    every: int = number(20, at_least=1)
    """trainer steps between checkpoints; the last step always has one"""
    keep: int = number(2, at_least=1)
    """number of newest checkpoints kept on disk"""
    keep_every: int = number(0, at_least=0)
    """checkpoints at multiples of this are kept as well; 0 = none"""
    state_hash: bool = False
    """store a SHA-256 over the whole trainer state in each checkpoint, which a resume at the same layout
    compares; training waits for it"""
    key: str | None = None
    """file with the key that signs this run's checkpoints, and that signed those it resumes from; null =
    run_dir/checkpoint.key, created by the run"""
    unsigned: bool = False
    """resume from a checkpoint whoever wrote it; loading one may run code of whoever wrote it"""


@dataclass
class ClusterConfig:
    host: str = "127.0.0.1"
    """address at which the controller listens and others reach this run"""
    place: str = ""
    """name of this machine's place, if it shares no trusted network with the trainer: its relays pull weights
    over an encrypted stream, one copy for all machines with the same place"""
    port: int = number(0, at_least=0, at_most=65_535)
    """the controller's port; 0 = any free port"""
    storage: str = choice("shared", "stream")
    """stream: rollouts send their responses to the controller over an encrypted connection, and may be on
    machines without the run's file system (laminar join); shared: all roles see run_dir"""
    join_port: int = number(0, at_least=0, at_most=65_535)
    """with storage=stream: the port to which rollouts send and machines join; 0 = any free port"""
    preemption_notice: str | None = None
    """a file that appears when this machine will be reclaimed, or the http address of a cloud's notice: its
    replicas then hand over their trajectories, as on TERM; with roles apart"""
    scale_command: str = ""
    """with rollout.replicas=MIN:MAX: a program that starts replicas, called with `start N`, `stop ID` and
    `list`, see running.md; empty = `laminar train` starts them on its machine, `laminar submit` on Slurm"""
    join_timeout_seconds: float = seconds(300.0)
    """time limit for all ranks to join"""
    heartbeat_timeout_seconds: float = seconds(30.0)
    """a process that is silent for this long counts as dead; shorter network cuts are tolerated. With roles
    apart a rollout's work continues elsewhere after a third of it, and the rollout rejoins without a
    restart"""
    batch_timeout_seconds: float = seconds(900.0)
    """a trainer's time limit for a batch, and the last evaluation's for a rollout"""
    stop_timeout_seconds: float = seconds(60.0)
    """minimum time limit of a clean stop; twice what earlier steps and checkpoints took, if that is more"""


@dataclass
class ObservabilityConfig:
    """What a run shows outside its run directory. Everything in docs/observing.md works without it."""

    profile: int = number(0, at_least=0, at_most=100)
    """number of steps after the first one for torch's profile in run_dir/profile, which also gets replica 0's
    engine; 0 = none"""
    show_samples: int = number(0, at_least=0, at_most=100)
    """number of responses shown on the console after each step, with reward and staleness; 0 = none"""
    wandb: str = choice("off", "offline", "online")
    """offline: files under run_dir/wandb; online: needs `wandb login` or WANDB_API_KEY"""
    wandb_project: str = "laminar"
    """project on Weights & Biases"""
    prometheus: str = "0"
    """PORT on loopback, or ADDRESS:PORT, at which Prometheus reads the run's metrics; 0 = none; see
    docs/observing.md"""
    prometheus_key: str = ""
    """file with the key that a scrape must present; empty = none on loopback, RUN_DIR/prometheus.key
    beyond"""
