"""Settings of `laminar sim` and `laminar plan`: conf/simulation/*.yaml holds their values. Imports no torch,
no numpy."""

from dataclasses import dataclass, field

from laminar_hpc.simulator.constants import (
    GROUP_CORRELATION,
    MEAN_RESPONSE_TOKENS_LAMINAR,
    PROMPT_TOKENS,
    SIGMA_LAMINAR,
)


@dataclass
class WorkloadConfig:
    """Responses: a log-normal body capped at `max_response_tokens`, similar inside a group; or real lengths
    from a file."""

    prompts_per_step: int = 512
    samples_per_prompt: int = 16
    updates_per_step: int = 16  # mini-batches per trainer step
    prompt_tokens: int = PROMPT_TOKENS
    mean_response_tokens: float = MEAN_RESPONSE_TOKENS_LAMINAR
    max_response_tokens: int = 16384
    sigma: float = SIGMA_LAMINAR  # of the log-lengths
    group_correlation: float = GROUP_CORRELATION  # of the log-lengths inside a group
    growth: float = 0.0  # the median grows by this share over the run
    # a run directory (its store is replayed), or lines of JSON lists: lengths of one group each
    lengths_file: str = ""
    turns: int = 1  # most turns of a trajectory; evenly distributed from 1
    turn_seconds: float = 0.0  # median wait for the environment after a turn
    turn_sigma: float = 0.0  # of its log
    turn_tokens: int = 0  # tokens that the environment adds after a turn

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        return self.prompt_tokens + self.max_response_tokens + (self.turns - 1) * self.turn_tokens


@dataclass
class SimulationConfig:
    """One sweep: each pipeline at each number of GPUs."""

    name: str = "simulation"
    out_dir: str = ""  # of report.html and result.json; empty = runs/sim-NAME
    seed: int = 0
    steps: int = 12  # trainer steps simulated
    warmup_steps: int = 4  # left out of the figures
    model: str = "32B"
    gpus: list[int] = field(default_factory=lambda: [64, 128])
    trainer_gpu: str = "H800"
    rollout_gpu: str = "H800"
    engine: str = "sglang"  # whose admission and preemption: sglang or vllm
    tensor_parallel: int | None = None  # GPUs of a replica; null = the model's own
    trainer_share: float | None = None  # of the GPUs, for pipelines that split them; null = the best of a few
    # known trainer shares by PIPELINE or PIPELINE@GPUS; they go before the search
    splits: dict[str, float] = field(default_factory=dict)
    pipelines: list[str] = field(default_factory=lambda: ["sync", "one_step", "stream", "partial", "laminar"])
    max_staleness: int | None = None  # of laminar and partial; null = the preset's
    max_concurrent: int = 256  # requests per replica
    checkpoint_every: int = 20
    rollout_mtbf_hours: float | None = None  # mean time between failures of a replica; null = never
    trainer_mtbf_hours: float | None = None  # of the trainer as a whole
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    # other values for fields of constants.Constants
    constants: dict[str, float] = field(default_factory=dict)


@dataclass
class PoolConfig:
    """GPUs of one type in whole machines. A preemptible pool is for rollouts only."""

    gpu: str = "H800"
    count: int = 64
    price: float | None = None  # $ per GPU and hour; null = the example price of constants.py
    preemptible: bool = False
    mtbf_hours: float | None = (
        # mean time between failures or preemptions of a replica, of a machine for the trainer; null = never
        None
    )


@dataclass
class PlanConfig:
    """What `laminar plan` is asked."""

    name: str = "plan"
    out_dir: str = ""  # of NAME.yaml and NAME.sbatch; empty = runs/plan-NAME
    seed: int = 0
    model: str = "32B"
    pools: list[PoolConfig] = field(default_factory=lambda: [PoolConfig()])
    # throughput: most tokens/s of all GPUs; cost: most tokens per $ that keeps the trainer busy
    objective: str = "throughput"
    trainer_busy: float = 0.9  # least share of time, with objective=cost
    max_staleness: int = 3
    max_concurrent: int = 256
    steps: int = 6
    warmup_steps: int = 2
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
