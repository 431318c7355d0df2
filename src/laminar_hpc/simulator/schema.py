"""Settings of `laminar sim` and `laminar plan`; conf/simulation/*.yaml holds their values. No torch."""

from dataclasses import dataclass, field

from laminar_hpc.config.bounds import bounds, choice, choices, number
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.simulator.constants import (
    GROUP_CORRELATION,
    MEAN_RESPONSE_TOKENS_LAMINAR,
    PROMPT_TOKENS,
    SIGMA_LAMINAR,
)
from laminar_hpc.simulator.request import ENGINES
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.tables import GPUS, MODELS


@dataclass
class WorkloadConfig:
    """Responses: a log-normal body capped at `max_response_tokens`, similar in a group; or from a file."""

    prompts_per_step: int = number(512, at_least=1, at_most=1_000_000)
    samples_per_prompt: int = number(16, at_least=1, at_most=10_000)
    updates_per_step: int = number(16, at_least=1, at_most=10_000)  # mini-batches per trainer step
    prompt_tokens: int = number(PROMPT_TOKENS, at_least=1, at_most=10_000_000)
    mean_response_tokens: float = number(MEAN_RESPONSE_TOKENS_LAMINAR, at_least=1, at_most=10_000_000)
    max_response_tokens: int = number(16384, at_least=2, at_most=10_000_000)
    # of the log-lengths
    sigma: float = number(
        SIGMA_LAMINAR, at_least=0.01, at_most=10, why="for equal lengths give workload.lengths_file"
    )
    # of the log-lengths inside a group
    group_correlation: float = number(GROUP_CORRELATION, at_least=0, at_most=1)
    growth: float = number(0.0, at_least=-0.99, at_most=100)  # the median grows by this share over the run
    # rows of the data, over again in each pass; 0 = each group has a prompt of its own
    prompts: int = number(0, at_least=0, at_most=100_000_000)
    # a run directory (its store is replayed), or lines of JSON lists: lengths of one group each
    lengths_file: str = ""
    turns: int = number(1, at_least=1, at_most=1000)  # maximum of a trajectory; evenly distributed from 1
    # median wait for the environment after a turn
    turn_seconds: float = number(0.0, at_least=0, at_most=100_000)
    turn_sigma: float = number(0.0, at_least=0, at_most=5)  # of its log
    # share of the calls that never return: the model is told after environment.timeout_seconds of a run
    turn_hung: float = number(0.0, at_least=0, at_most=0.5)
    # tokens that the environment adds after a turn
    turn_tokens: int = number(0, at_least=0, at_most=1_000_000)

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        return self.prompt_tokens + self.max_response_tokens + (self.turns - 1) * self.turn_tokens


@dataclass
class PoolConfig:
    """GPUs of one type in whole machines. A pool that is preemptible or elsewhere is for rollouts only."""

    gpu: str = field(default="H800", metadata=choices(GPUS))
    count: int = number(64, at_least=1, at_most=65_536)
    # $ per GPU and hour; null = the example price of tables/gpus.yaml
    price: float | None = number(
        None, above=0, at_most=1e6, why="tokens per $ are asked for; null takes an example price"
    )
    preemptible: bool = False
    # mean time between failures or preemptions of a replica, of a machine for the trainer; null = never
    mtbf_hours: float | None = number(
        None, at_least=0.25, at_most=1e6, why="a replica needs two minutes to come back"
    )
    # of preemptible ones: from the notice to the end, in which trajectories are handed over
    grace_seconds: float = number(0.0, at_least=0, at_most=3600)
    # of the link between the pool and the trainer's place, in Gbit/s; null = it is in that place
    wan_gbps: float | None = number(None, at_least=0.001, at_most=100_000)
    wan_milliseconds: float = number(0.0, at_least=0, at_most=10_000)  # its round trip
    wan_loss: float = number(0.0, at_least=0, at_most=0.5)  # share of its packets

    @property
    def only_generates(self) -> bool:
        return self.preemptible or self.wan_gbps is not None


@dataclass
class SimulationConfig:
    """One sweep: each pipeline at each number of GPUs."""

    name: str = "simulation"
    out_dir: str = ""  # of report.html and result.json; empty = runs/sim-NAME
    seed: int = number(0, at_least=0)
    steps: int = number(12, at_least=1, at_most=10_000)  # trainer steps simulated
    warmup_steps: int = number(4, at_least=0, at_most=9_999)  # left out of the figures
    # of all uncertain constants, for the range of each rate, a short run each; 0 = no range
    draws: int = number(8, at_least=0, at_most=1000)
    # of tables/models.yaml, or a model directory
    model: str = field(default="32B", metadata=choices(MODELS))
    gpus: list[int] = field(default_factory=lambda: [64, 128], metadata=bounds(at_least=1, at_most=262_144))
    lora: LoraConfig = field(default_factory=LoraConfig)  # with a rank an adapter is trained, as model.lora
    trainer_gpu: str = field(default="H800", metadata=choices(GPUS))
    rollout_gpu: str = field(default="H800", metadata=choices(GPUS))
    engine: str = choice(*ENGINES)  # whose admission, preemption and host (constants.py)
    cuda_graphs: bool = True  # false: each decode step launches its kernels one by one
    speculation: bool = False  # steps verify guesses where that is faster: speculation.py
    # GPUs of a replica; null = the model's own
    tensor_parallel: int | None = number(None, at_least=1, at_most=64)
    # of the GPUs, for pipelines that split them; null = the best of a few
    trainer_share: float | None = number(None, at_least=0.001, at_most=1)
    # known trainer shares by PIPELINE or PIPELINE@GPUS; they go before the search
    splits: dict[str, float] = field(default_factory=dict, metadata=bounds(at_least=0.001, at_most=1))
    pipelines: list[str] = field(
        default_factory=lambda: ["sync", "one_step", "stream", "partial", "laminar"],
        metadata=choices(PIPELINES),
    )
    # of all but sync and sync_split, where it is 0; with 0.5 half a batch may be a step late;
    # null = the preset's
    max_staleness: float | None = number(
        None, at_least=0, at_most=1000, why="with less than 0 no prompt is ever given out"
    )
    max_concurrent: int = number(256, at_least=1, at_most=100_000)  # requests per replica
    # rollouts beside those of `gpus`, in other places or of other types
    sites: list[PoolConfig] = field(default_factory=list)
    # equal parts of all GPUs, each with a trainer, rollouts and batches of its own; they average their
    # weights at the end of each step
    trainer_groups: int = number(1, at_least=1, at_most=1024)
    checkpoint_every: int = number(20, at_least=1, at_most=1_000_000)
    # mean time between failures of a replica; null = never
    rollout_mtbf_hours: float | None = number(
        None, at_least=0.05, at_most=1e6, why="a replica needs two minutes to come back"
    )
    # of the trainer as a whole
    trainer_mtbf_hours: float | None = number(
        None, at_least=0.25, at_most=1e6, why="a job needs five minutes to start again"
    )
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    # other values for fields of constants.Constants, which have the bounds
    constants: dict[str, float] = field(default_factory=dict)

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel or MODELS[self.model].tensor_parallel


@dataclass
class PlanConfig:
    """What `laminar plan` is asked."""

    name: str = "plan"
    out_dir: str = ""  # of experiment/NAME.yaml; empty = runs/plan-NAME
    seed: int = number(0, at_least=0)
    model: str = field(default="32B", metadata=choices(MODELS))
    pools: list[PoolConfig] = field(default_factory=lambda: [PoolConfig()])
    # throughput: the maximum of tokens/s of all GPUs; cost: of tokens per $ that keeps the trainer busy
    objective: str = choice("throughput", "cost")
    trainer_busy: float = number(0.9, at_least=0, at_most=1)  # minimum share of time, with objective=cost
    # minimum tokens/s of what is bought, with objective=cost
    least_throughput: float = number(0.0, at_least=0, at_most=1e12)
    max_staleness: int = number(
        3, at_least=0, at_most=1000, why="with less than 0 no prompt is ever given out"
    )
    max_concurrent: int = number(256, at_least=1, at_most=100_000)
    steps: int = number(12, at_least=1, at_most=1000)  # trainer steps simulated
    # left out of the figures: where rollouts are the narrower side, the first steps are faster than all later
    # ones, as they train what ends first
    warmup_steps: int = number(6, at_least=0, at_most=999)
    # of a core, for a search through all divisions; null = until no other promises more, at most 90
    budget_seconds: float | None = number(None, above=0, at_most=1e6)
    lora: LoraConfig = field(default_factory=LoraConfig)  # of the run: model.lora
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
