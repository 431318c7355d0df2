"""What model.deterministic does not go with, in the way of rules.py: whatever makes a token, or the batch of
a step, depend on time or on a program that this run does not start. Imports no torch.
"""

from collections.abc import Iterator

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.teachers import is_server, teachers_of

# Attention of SGLang 0.5.21 with batch-invariant kernels that also keeps its prefix cache, in which moves and
# later turns look (arg_groups/choices.py:244, RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND).
ATTENTION = ("triton", "fa3", "fa4")
_BACKENDS = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")


def wrong_determinism(config: RunConfig) -> Iterator[str]:
    """One line each."""
    if not config.model.deterministic:
        return
    key, a, p = "model.deterministic=true", config.algorithm, config.pipeline
    if p.refresh == "interrupt":
        why = "new weights come into a response at a place that time decides"
        yield f"{key} does not go with @pipeline.refresh: {why}; take pipeline=sync or laminar"
    if p.consumption == "stream":
        why = "mini-batches are made of what is finished first"
        yield f"{key} does not go with @pipeline.consumption: {why}; take pipeline=sync or one_step"
    if a.first_samples is not None:
        why = "later samples are numbered, and so drawn, in the order in which earlier ones are scored"
        yield f"{key} does not go with @algorithm.first_samples: {why}; leave it at null"
    if config.rollout.engine != "sglang":
        yield f"{key} needs rollout.engine=sglang: the tokens of an emulated engine follow from no weights"
    if any(isinstance(model, str) and is_server(model) for model in teachers_of(config.teacher).values()):
        why = "a server's log-probs depend on what else it is asked"
        yield f"{key} does not go with a teacher behind a URL: {why}; name a directory"
    for name, value in config.rollout.engine_arguments.items():
        if name.replace("_", "-") in _BACKENDS and value not in ATTENTION:
            yield f"rollout.engine_arguments.{name}={value}: {key} needs one of {', '.join(ATTENTION)}"


def refuse_on_cpu(config: RunConfig) -> None:
    """By a rank that finds no GPU. Raises LaminarError."""
    if config.model.dtype != "float32":
        raise LaminarError(
            f"model.deterministic=true on the CPU needs model.dtype=float32, not {config.model.dtype}"
        )
    if config.rollout.tensor_parallel > 1:
        raise LaminarError(
            "model.deterministic=true on the CPU needs rollout.tensor_parallel=1: gloo's sum over ranks "
            "depends on the size of the batch"
        )


def refuse_on_gpu(config: RunConfig) -> None:
    """By a rollout rank with a GPU. Raises LaminarError."""
    if config.model.lora.rank:
        raise LaminarError(
            "model.deterministic=true on a GPU does not go with model.lora.rank: SGLang's kernels for "
            "adapters depend on the batch; set it to 0"
        )
