"""What lets an experiment that `laminar plan` has written run on machines without GPUs."""

from laminar_hpc.config.directories import examples_directory

WORK = [  # of the question
    "model=0.5B",
    "workload.prompts_per_step=8",
    "workload.samples_per_prompt=4",
    "workload.updates_per_step=2",
    "workload.mean_response_tokens=30",
    "workload.max_response_tokens=128",
]
FEW_STEPS = [  # of a simulation
    "workload.prompts_per_step=32",
    "workload.samples_per_prompt=4",
    "workload.updates_per_step=4",
    "steps=4",
    "warmup_steps=1",
]
SMALL = [  # of the run: a small model, and no engine
    f"model.path={examples_directory('arithmetic/base')}",
    "model.dtype=float32",
    "trainer.gpu_memory_gigabytes=null",
    "rollout.gpu_memory_gigabytes=null",
    "trainer.tokens_per_microbatch=2048",
    f"data.train={examples_directory('arithmetic/data/train.jsonl')}",
    "reward.function=laminar_hpc.environments.arithmetic.reward",
    "rollout.engine=emulated",
    "emulation.model=0.5B",
    "emulation.median_response_tokens=30",
]
