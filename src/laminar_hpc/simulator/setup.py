"""What one simulated run is given: its rules, its engines and trainer with their costs, and its workload."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from laminar_hpc.config.schema import EnvironmentConfig, LoraConfig
from laminar_hpc.policies.repack import saturation_batch
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.cost import EngineCosts, chain_seconds, engine_costs, kv_capacity
from laminar_hpc.simulator.links import global_sync_seconds
from laminar_hpc.simulator.lora import serving_adapters, trained_part
from laminar_hpc.simulator.published_layout import offloaded_layout, trainer_layout
from laminar_hpc.simulator.request import EngineAdmission
from laminar_hpc.simulator.rules import Rules
from laminar_hpc.simulator.schema import PoolConfig, WorkloadConfig
from laminar_hpc.simulator.speculation import speculating
from laminar_hpc.simulator.tables import GPUS, Gpu, Model
from laminar_hpc.simulator.trainer_cost import JobCosts, Layout, colocated, job_costs
from laminar_hpc.simulator.turns.course import Known
from laminar_hpc.simulator.turns.environments import Environments
from laminar_hpc.simulator.wide_area.link import Site, WanLink, chained


@dataclass(frozen=True)
class Engines:
    """Replicas of one kind. `mtbf`: mean seconds between failures or preemptions of one; None = never;
    `grace`: seconds from a notice to it. `site`: its place in Setup.sites, from 1; 0 = beside the trainer."""

    count: int
    gpus: int
    costs: EngineCosts
    capacity: int
    saturation: int
    mtbf: float | None = None
    site: int = 0
    grace: float = 0.0


class Rollout(NamedTuple):
    """Replicas of one pool. `mtbf`: seconds between failures of one; `grace`: from a notice to it; `link`: to
    another place than the trainer's."""

    gpu: Gpu
    gpus: int
    tensor_parallel: int
    mtbf: float | None = None
    grace: float = 0.0
    link: WanLink | None = None


def rollout_of(pool: PoolConfig, gpus: int, tensor_parallel: int) -> Rollout:
    """`gpus` of a pool as its settings say."""
    link = None
    if pool.wan_gbps is not None:
        link = WanLink(pool.wan_gbps * 1e9 / 8, pool.wan_milliseconds / 1e3, pool.wan_loss)
    mtbf, grace = pool.mtbf_hours and pool.mtbf_hours * 3600, pool.grace_seconds
    return Rollout(GPUS[pool.gpu], gpus, tensor_parallel, mtbf, grace, link)


@dataclass(frozen=True)
class SimulationSetup:
    """A whole run, in seconds and tokens."""

    rules: Rules
    engines: tuple[Engines, ...]
    job: JobCosts
    trainer_gpus: int
    layout: Layout
    workload: WorkloadConfig
    steps: int
    warmup_steps: int
    admission: EngineAdmission
    sites: tuple[Site, ...] = ()  # other places than the trainer's, to which weights take longer
    seed: int = 0
    max_concurrent: int = 256
    repack_kv_share: float = 0.9
    checkpoint_every: int = 20
    trainer_mtbf: float | None = None
    # local batches of all replicas are equal, as in a live run; else each is by its replica's rate
    equal_batches: bool = False
    local_batch_groups: int | None = None  # of each replica; None: its part of a batch
    # nothing is granted that `steps` steps will not train, as in a live run; else the run is cut off in full
    # swing
    ends: bool = False
    lengths: list[list[int]] | None = None  # response tokens of each group, in place of the workload's
    known: Known | None = None  # the same of several turns, with what their calls took
    limits: EnvironmentConfig | None = None  # of a run; None: those of the workload
    speed_spread: float = 0.0  # standard deviation of the log of a replica's speed
    watch: bool = False  # keep time lines and samples for the report

    @property
    def several(self) -> bool:
        """Trajectories have several turns."""
        return self.workload.turns > 1 or self.known is not None

    def environments(self) -> Environments:
        """Functions as tools, but for a run that had a factory or agents."""
        w, limits = self.workload, self.limits
        bound = limits is not None and bool(limits.factory or limits.by_url)
        limits = limits or EnvironmentConfig(max_turns=w.turns, max_tool_calls=w.turns, max_seconds=math.inf)
        return Environments(limits, bound, self.job.turn_scale, w.max_response_tokens)


def _sites(parts: Sequence[Rollout], size: float, c: Constants) -> tuple[Site, ...]:
    """The places of the pools that have a link; `size`: bytes of the weights."""
    relays = [(part.link, math.ceil(part.gpus / part.gpu.machine)) for part in parts if part.link is not None]
    return chained(size, [(link, chain_seconds(size, machines, c)) for link, machines in relays], c)


def _costs_of(
    part: Rollout,
    model: Model,
    lora: LoraConfig,
    trainer: tuple[Gpu, int],
    c: Constants,
    graphs: bool,
    engine: str,
) -> EngineCosts:
    """`trainer`: its GPU type, and how many of them."""
    costs = engine_costs(model, part.gpu, part.tensor_parallel, c, graphs, engine)
    costs = serving_adapters(costs, model, part.gpu, part.tensor_parallel, lora, c)
    sync = global_sync_seconds(trained_part(model, lora), *trainer, part.gpu, part.gpus, c)
    return dataclasses.replace(costs, global_sync=sync)


def setup(
    rules: Rules,
    model: Model,
    trainer_gpu: Gpu,
    trainer_gpus: int,
    rollouts: Sequence[Rollout | tuple[Gpu, int, int, float | None]],
    workload: WorkloadConfig,
    c: Constants,
    engine: str = "sglang",
    cuda_graphs: bool = True,
    layout: Layout | None = None,
    speculation: bool = False,
    lora: LoraConfig | None = None,
    **settings: Any,
) -> SimulationSetup:
    """`rollouts`: each a Rollout or the beginning of one; colocated: the same GPUs as the trainer's.
    `layout`: the trainer's, None = that of a published system, which trains `lora`."""
    parts = [part for entry in rollouts if (part := Rollout(*entry)).gpus >= part.tensor_parallel]
    numbers = count(1)  # of the places
    requests = settings.get("max_concurrent", SimulationSetup.max_concurrent)
    share = c.kv_memory_share_colocated if rules.placement == "colocated" else c.kv_memory_share
    guessing = speculating if speculation else lambda costs: costs
    layout = layout or trainer_layout(model, trainer_gpu, trainer_gpus, workload, c, lora)
    layout = layout or offloaded_layout(model, trainer_gpu, trainer_gpus, workload, c, lora)
    trainer = (trainer_gpu, trainer_gpus)
    size = 2.0 * trained_part(model, layout.lora).parameters
    kinds = tuple(
        Engines(
            count=part.gpus // part.tensor_parallel,
            gpus=part.tensor_parallel,
            costs=guessing(_costs_of(part, model, layout.lora, trainer, c, cuda_graphs, engine)),
            capacity=kv_capacity(model, part.gpu, part.tensor_parallel, share, requests),
            saturation=saturation_batch(part.gpu.flops, part.gpu.hbm),
            mtbf=part.mtbf,
            site=next(numbers) if part.link is not None else 0,
            grace=part.grace,
        )
        for part in parts
    )
    total = sum(part.gpus for part in parts if part.link is None)
    job = job_costs(model, trainer_gpu, trainer_gpus, layout, total, workload.max_response_tokens, c)
    return SimulationSetup(
        rules,
        kinds,
        colocated(job, c) if rules.placement == "colocated" else job,
        trainer_gpus,
        layout,
        workload,
        admission=EngineAdmission.of(workload.max_response_tokens, c, engine),
        sites=_sites(parts, size, c),
        repack_kv_share=c.repack_kv_share,
        speed_spread=c.replica_speed_spread,
        **settings,
    )
