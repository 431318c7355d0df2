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
    """ranks over which every layer is split; divides the model's heads, key-value heads and feed-forward
    width"""
    pipeline_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """stages of consecutive layers; at most the number of layers"""
    context_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """ranks over which the tokens of every micro-batch are split; with tensor_parallel it divides the model's
    heads"""
    virtual_stages: int = number(1, at_least=1, at_most=1024)
    """chunks of layers of each pipeline stage, run in turns: the pipeline idles so many times less and keeps
    more activations; with pipeline_parallel they divide the number of layers"""
    data_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """replicas of the trainer (tensor_parallel x context_parallel x pipeline_parallel ranks); each takes its
    share of every batch"""
    expert_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """ranks over which whole experts are divided, of the tensor_parallel x context_parallel x data_parallel
    ranks of a stage; with 1 each expert is split over the tensor-parallel ranks as other layers are"""
    tokens_per_microbatch: int = number(4096, at_least=1)
    """packed, on each context-parallel rank; a trajectory longer than theirs together is refused at start-up
    """
    distributed_optimizer: bool = False
    """Megatron's distributed optimizer; its state is split over the data-parallel ranks"""
    devices: list[int] | None = field(default=None, metadata=bounds(at_least=0))
    """GPUs of each machine that trainer ranks use, one each in order; null = the first ones"""
    recompute_activations: str = choice("auto", "none", "selective", "full")
    """what is computed anew in the backward pass instead of kept: selective, what norms and activations give,
    which takes no matrix product, and experts; full, each layer; auto: the least with which the memory
    estimate fits the GPU, none where its memory is unknown"""
    threads: int = number(1, at_least=1, at_most=THREADS_MAX)
    """CPU threads per rank"""
    gpu_memory_gigabytes: float | None = number(None, above=0, at_most=100_000)
    """of each GPU, 10^9 bytes; what cannot fit is refused; null = this machine's, if it has any"""

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
    """the trainer goes on while its weights are read, until the next update; copied: through that too, as
    they are read from a copy on its GPU; blocking: it stands still"""
    chunk_megabytes: int = number(64, at_least=1, at_most=65_536)
    """size of the pieces in which weights are sent; the trainer's rank 0 has two such buffers on its device
    """
    transport: str = choice("auto", "nccl", "host")
    """from trainer to relay and relay to relay: nccl between GPUs, host through host memory; auto: nccl
    between machines that both use a GPU, else host"""
    publish_timeout_seconds: float = seconds(60.0)
    """longest time for one publication to reach a relay"""
    delta: str = choice("off", "auto")
    """auto: send only what changed where that is smaller; senders then keep a copy of the weights in host
    memory"""
    full_every: int = number(20, at_least=1)
    """with delta=auto one publication in so many goes in full, whatever has changed; 1 sends all in full"""
    threads: int = number(1, at_least=1, at_most=THREADS_MAX)
    """of a relay's process"""
    gate: str = ""
    """[HOST:]PORT at which relays of other places reach the trainer's: its firewall lets them in there, and
    forwards to the relay if HOST is no address of its machine; "": the relay's own address, any port"""
    parked_gigabytes: float | None = number(None, at_least=0, at_most=100_000)
    """host memory, 10^9 bytes, in which each relay keeps KV caches of replicas that are taken back, until
    others have room; 0 = none, null = a quarter of what is free then"""


@dataclass
class RolloutConfig:
    replicas: int | str = number(1, at_least=1, at_most=RANKS_MAX, span=True)
    """rollout ranks, each with an engine of its own; with roles apart more may join at any time. MIN:MAX
    begins with MIN, and the run starts and ends others by its own measurements"""
    replicas_min: int | None = number(None, at_least=1, at_most=RANKS_MAX)
    """with roles apart: so many are awaited at the start; null = all"""
    tensor_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """processes per replica that share one copy of the weights; divides the model's heads"""
    expert_parallel: int = number(1, at_least=1, at_most=RANKS_MAX)
    """of these processes, so many divide whole experts; 1: each expert is split over all of them"""
    max_concurrent: int = number(256, at_least=1)
    """requests in flight per replica"""
    kv_cache_tokens: int = number(65536, at_least=1)
    """size of an engine's KV cache"""
    engine_start_seconds: float = seconds(600.0)
    """longest time for an engine to be ready; on a GPU it captures CUDA graphs, and may compile kernels"""
    request_timeout_seconds: float = seconds(600.0)
    """longest time for one generation"""
    threads: int = number(1, at_least=1, at_most=THREADS_MAX)
    """CPU threads per engine"""
    devices: list[int] | None = field(default=None, metadata=bounds(at_least=0))
    """GPUs of each machine that replicas use, in order; null = those after the trainers', or all"""
    engine_arguments: dict[str, str] = field(default_factory=dict)
    """passed to SGLang's server as --key value"""
    engine: str = choice("sglang", "emulated")
    """emulated: no model at all, see `emulation`"""
    gpu_memory_gigabytes: float | None = number(None, above=0, at_most=100_000)
    """as trainer.gpu_memory_gigabytes, for the engines' GPUs"""
    increment_tokens: int = number(256, at_least=0)
    """responses go to the partial-response pool every so many tokens: no more of each is lost with a replica
    that dies; 0 = never"""
    speculation: str = choice("off", "ngram", "suffix", "auto")
    """guesses of the next tokens, verified in one pass, which change no distribution: ngram from a response's
    own words, suffix from other responses too, auto: that where it is measured to pay; on CPU engines"""

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
    """whose costs, by conf/simulation/tables and simulator/constants.py"""
    gpu: str = choice(
        *("H800", "A100", "H100", "H20", "H200", "B200", "GB200"),
        *("L40S", "L4", "A10", "RTX3090", "RTX4090", "MI300X"),
    )
    """the same"""
    tensor_parallel: int | None = number(None, at_least=1, at_most=64)
    """GPUs of a replica; null = the model's own"""
    median_response_tokens: float = number(1097.0, at_least=1)
    """lengths are log-normal, similar inside a group, at most sampling.max_response_tokens"""
    sigma: float = number(1.69, at_least=0, at_most=10)
    """of the log-lengths"""
    turn_tokens: int = number(0, at_least=0)
    """a response's turns end at multiples of so many tokens, each but the last with `call`; 0 = one turn"""
    call: str = ""
    """the text of a tool call, in the model's own format"""
    wire_share: float = number(1.0, at_least=0, at_most=1)
    """of a KV cache's bytes that really cross the socket; all of them are charged"""
    constants: dict[str, float] = field(default_factory=dict, metadata=bounds(at_least=0))
    """other values for fields of simulator/constants.py"""


@dataclass
class PipelineConfig:
    """A pipeline is a few policy values; `conf/pipeline/*.yaml` are presets of them."""

    name: str = "laminar"
    """shown in logs and reports; decides nothing"""
    refresh: str = choice("drained", "barrier", "interrupt", "versions")
    """drained: a replica pulls when its local batch is done; barrier: all together; interrupt: at once;
    versions: it holds several adapters at once, and each trajectory keeps its own (with model.lora.rank)"""
    max_staleness: int | str | None = number(2, at_least=0, word="auto")
    """in trainer steps at training time; auto:N = follows who waits, at most N; auto = auto:8; null = no
    bound, first finished first trained"""
    consumption: str = choice("batch", "stream")
    """batch: the trainer takes a whole batch; stream: each mini-batch as soon as its groups are finished"""
    local_batch_groups: int | None = number(None, at_least=1)
    """prompt groups per local batch; null = ceil(prompts_per_step / replicas)"""
    dispatch: str = choice("longest_first", "in_order")
    """of the prompts of a step, which go out first: longest_first: from the second pass over the data on each
    local batch gets its share of those whose responses were long, and begins with them; in_order: as drawn"""
    keep_kv: bool = False
    """of interrupt: go on with the KV cache of the earlier weights; false = prefill again"""
    repack: str = choice("auto", "off", "reprefill", "kv")
    """the tail of a local batch moves to other replicas on the same weights. auto: with its KV cache where
    caches move, when that frees more seconds than it costs; kv, reprefill: with its KV cache or without,
    whenever it fits"""
    repack_seconds: float = seconds(5.0)
    """between two looks at the replicas; there is one more after each publication"""
    repack_requests: int | None = number(None, at_least=1)
    """maximum number of requests that a replica is filled to; null = from its measured decode curve"""

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
    """named as data.train; the first is that of accuracy_before and _after; [] = none"""
    problems: int | None = number(None, at_least=1)
    """the first so many of each file; null = all"""
    samples: int = number(1, at_least=0)
    """responses per problem of the sampled evaluation (k); 0 = greedy only"""
    every: int = number(0, at_least=0)
    """trainer steps between evaluations on the way; 0 = before and after only"""


@dataclass
class CheckpointConfig:
    every: int = number(20, at_least=1)
    """from one checkpoint to the next; the last step always has one"""
    keep: int = number(2, at_least=1)
    """the newest so many stay on disk"""
    keep_every: int = number(0, at_least=0)
    """checkpoints of its multiples stay on disk as well; 0 = none"""
    state_hash: bool = False
    """a checkpoint has a SHA-256 over all of the trainer's state, which a resume at its layout compares;
    training waits for it"""
    key: str | None = None
    """file with the key that signs this run's checkpoints, and has signed those that it goes on from; null =
    run_dir/checkpoint.key, made by the run"""
    unsigned: bool = False
    """go on from a checkpoint whoever has written it; loading one may run what its writer wanted"""


@dataclass
class ClusterConfig:
    host: str = "127.0.0.1"
    """address at which the controller listens and others reach this run"""
    place: str = ""
    """of this machine, where it shares no trusted network with the trainer: its relays pull weights over an
    encrypted stream, one copy for all machines that name the same place"""
    port: int = number(0, at_least=0, at_most=65_535)
    """0 = any free port"""
    storage: str = choice("shared", "stream")
    """stream: rollouts send their responses to the controller over an encrypted line, and may be where no
    file system of the run is (laminar join); shared: all roles see run_dir"""
    join_port: int = number(0, at_least=0, at_most=65_535)
    """of storage=stream: where rollouts send and machines join; 0 = any free port"""
    preemption_notice: str | None = None
    """a file that appears when this machine will be taken back, or the http address of a cloud's notice: its
    replicas then hand over what they generate, as at TERM; with roles apart"""
    scale_command: str = ""
    """with rollout.replicas=MIN:MAX: a program that starts replicas, called with `start N`, `stop ID` and
    `list`, see running.md; empty = `laminar train` starts them on its machine, `laminar submit` on Slurm"""
    join_timeout_seconds: float = seconds(300.0)
    """for all ranks to be there"""
    heartbeat_timeout_seconds: float = seconds(30.0)
    """a process that is silent for so long counts as dead; the network may be cut for nearly so long. With
    roles apart a rollout's work goes on elsewhere after a third of it; it comes back without a start"""
    batch_timeout_seconds: float = seconds(900.0)
    """a trainer's longest wait for a batch, and the last evaluation's for a rollout"""
    stop_timeout_seconds: float = seconds(60.0)
    """least limit of an orderly stop; where earlier steps and checkpoints took long, twice what they took"""


@dataclass
class ObservabilityConfig:
    """What a run shows besides its run directory. Everything in docs/observing.md works without it."""

    profile: int = number(0, at_least=0, at_most=100)
    """torch's profile of so many steps, after the first one, and of replica 0's engine, in run_dir/profile;
    0 = none"""
    show_samples: int = number(0, at_least=0, at_most=100)
    """responses on the console after each step, with reward and staleness; 0 = none"""
    wandb: str = choice("off", "offline", "online")
    """offline: files under run_dir/wandb; online: needs `wandb login` or WANDB_API_KEY"""
    wandb_project: str = "laminar"
    """project on Weights & Biases"""
    prometheus: str = "0"
    """PORT on loopback, or ADDRESS:PORT, at which Prometheus reads the run's figures; 0 = none; see
    docs/observing.md"""
    prometheus_key: str = ""
    """file of the key that a scrape has to bring; empty = none on loopback, RUN_DIR/prometheus.key beyond"""
