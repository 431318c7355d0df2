"""What verl and slime call our keys, for whoever brings a command line of theirs: a refusal names ours.

A test keeps the table of docs/week_one.md to these rows."""

from collections.abc import Container
from typing import NamedTuple

_VERL_ACTOR = "actor_rollout_ref.actor"
_VERL_ROLLOUT = "actor_rollout_ref.rollout"


class Row(NamedTuple):
    """`key` is ours; `how` says what its value is, where that is not theirs unchanged."""

    key: str
    verl: tuple[str, ...]
    slime: tuple[str, ...]
    how: str = ""


ROWS = (
    Row("model.path", ("actor_rollout_ref.model.path",), ("--hf-checkpoint",)),
    Row("data.train", ("data.train_files",), ("--prompt-data",), "one file, folder or dataset"),
    Row("evaluation.files", ("data.val_files",), ("--eval-prompt-data",), "a list: [a.jsonl,b.jsonl]"),
    Row("data.prompt_field", ("data.prompt_key",), ("--input-key",)),
    Row("data.answer_field", (), ("--label-key",), "of verl's rows reward_model.ground_truth"),
    Row("data.chat_template", (), ("--apply-chat-template",), "true, as verl always does"),
    Row("data.max_prompt_tokens", ("data.max_prompt_length",), ("--rollout-max-prompt-len",)),
    Row("data.too_long", ("data.filter_overlong_prompts", "data.truncation"), (), "drop or refuse"),
    Row("sampling.max_response_tokens", ("data.max_response_length",), ("--rollout-max-response-len",)),
    Row("sampling.temperature", (f"{_VERL_ROLLOUT}.temperature",), ("--rollout-temperature",)),
    Row("algorithm.prompts_per_step", ("data.train_batch_size",), ("--rollout-batch-size",)),
    Row("algorithm.samples_per_prompt", (f"{_VERL_ROLLOUT}.n",), ("--n-samples-per-prompt",)),
    Row(
        "algorithm.minibatches_per_step",
        (f"{_VERL_ACTOR}.ppo_mini_batch_size",),
        ("--global-batch-size", "--num-steps-per-rollout"),
        "updates per step: how many mini-batches a step's batch is divided into",
    ),
    Row(
        "trainer.tokens_per_microbatch",
        (f"{_VERL_ACTOR}.ppo_max_token_len_per_gpu", f"{_VERL_ACTOR}.ppo_micro_batch_size_per_gpu"),
        ("--max-tokens-per-gpu", "--micro-batch-size"),
        "in tokens; packing is always on",
    ),
    Row(
        "algorithm.advantage",
        ("algorithm.adv_estimator",),
        ("--advantage-estimator",),
        "grpo, rloo, reinforce_pp or reinforce_pp_baseline; gspo and cispo are algorithm.loss",
    ),
    Row(
        "algorithm.normalize_std",
        ("algorithm.norm_adv_by_std_in_grpo",),
        ("--disable-grpo-std-normalization",),
        "false turns it off",
    ),
    Row("algorithm.clip_low", (f"{_VERL_ACTOR}.clip_ratio_low",), ("--eps-clip",)),
    Row("algorithm.clip_high", (f"{_VERL_ACTOR}.clip_ratio_high",), ("--eps-clip-high",)),
    Row("algorithm.clip_dual", (f"{_VERL_ACTOR}.clip_ratio_c",), ("--eps-clip-c",)),
    Row(
        "algorithm.loss_aggregation",
        (f"{_VERL_ACTOR}.loss_agg_mode",),
        ("--calculate-per-token-loss",),
        "tokens (token-mean), sequences (seq-mean-token-mean) or constant (seq-mean-token-sum-norm)",
    ),
    Row(
        "algorithm.kl_coefficient",
        (f"{_VERL_ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", f"{_VERL_ACTOR}.use_kl_loss"),
        ("--kl-loss-coef", "--kl-coef", "--use-kl-loss"),
        "0 = none; in the reward with algorithm.kl_in_reward=true",
    ),
    Row("algorithm.kl_in_reward", ("algorithm.use_kl_in_reward",), (), "beside algorithm.kl_coefficient"),
    Row(
        "algorithm.kl_estimator",
        (f"{_VERL_ACTOR}.kl_loss_type",),
        ("--kl-loss-type",),
        "k1, k2 or k3 (low_var_kl)",
    ),
    Row(
        "algorithm.zero_variance",
        ("algorithm.filter_groups.enable",),
        ("--dynamic-sampling-filter-path",),
        "filter",
    ),
    Row(
        "algorithm.importance_weight_cap",
        ("algorithm.rollout_correction.rollout_is_threshold",),
        ("--tis-clip", "--use-tis"),
        "a number, with algorithm.proximal=recomputed",
    ),
    Row("optimizer.lr", (f"{_VERL_ACTOR}.optim.lr",), ("--lr",)),
    Row("optimizer.weight_decay", (f"{_VERL_ACTOR}.optim.weight_decay",), ("--weight-decay",)),
    Row("optimizer.warmup_steps", (f"{_VERL_ACTOR}.optim.lr_warmup_steps",), ()),
    Row("optimizer.clip_grad", (f"{_VERL_ACTOR}.grad_clip",), ("--clip-grad",)),
    Row(
        "trainer.tensor_parallel",
        (f"{_VERL_ACTOR}.megatron.tensor_model_parallel_size",),
        ("--tensor-model-parallel-size",),
    ),
    Row(
        "trainer.pipeline_parallel",
        (f"{_VERL_ACTOR}.megatron.pipeline_model_parallel_size",),
        ("--pipeline-model-parallel-size",),
    ),
    Row(
        "trainer.data_parallel",
        ("trainer.n_gpus_per_node", "trainer.nnodes"),
        ("--actor-num-gpus-per-node", "--actor-num-nodes"),
        "the trainer's GPUs over tensor_parallel x pipeline_parallel",
    ),
    Row(
        "rollout.tensor_parallel",
        (f"{_VERL_ROLLOUT}.tensor_model_parallel_size",),
        ("--rollout-num-gpus-per-engine",),
    ),
    Row(
        "rollout.replicas",
        ("rollout.n_gpus_per_node", "rollout.nnodes"),
        ("--rollout-num-gpus",),
        "the rollouts' GPUs over rollout.tensor_parallel",
    ),
    Row(
        "rollout.kv_cache_tokens",
        (f"{_VERL_ROLLOUT}.gpu_memory_utilization",),
        ("--sglang-mem-fraction-static",),
        "in tokens; dry_run=true says whether it fits",
    ),
    Row(
        "rollout.max_concurrent",
        (f"{_VERL_ROLLOUT}.max_num_seqs",),
        ("--sglang-max-running-requests",),
    ),
    Row(
        "pipeline.max_staleness",
        ("async_training.staleness_threshold",),
        (),
        "in trainer steps",
    ),
    Row(
        "reward.function",
        ("custom_reward_function.path", "custom_reward_function.name"),
        ("--custom-rm-path", "--rm-type"),
        "MODULE.NAME; verl's functions run unchanged with reward.style=verl",
    ),
    Row(
        "environment.tools",
        (f"{_VERL_ROLLOUT}.multi_turn.tool_config_path",),
        ("--custom-generate-function-path",),
        "Python functions; or environment.factory, environment.agent",
    ),
    Row(
        "environment.max_turns",
        (f"{_VERL_ROLLOUT}.multi_turn.max_assistant_turns",),
        (),
    ),
    Row(
        "steps",
        ("trainer.total_training_steps", "trainer.total_epochs"),
        ("--num-rollout", "--num-epoch"),
        "trainer steps; an epoch is prompts / algorithm.prompts_per_step of them",
    ),
    Row("evaluation.every", ("trainer.test_freq",), ("--eval-interval",), "0 = before and after only"),
    Row("checkpoint.every", ("trainer.save_freq",), ("--save-interval",)),
    Row("checkpoint.keep", ("trainer.max_actor_ckpt_to_keep",), ()),
    Row("run_dir", ("trainer.default_local_dir", "trainer.experiment_name"), ("--save",)),
    Row("resume", ("trainer.resume_mode",), ("--load",), "auto or never"),
    Row("observability.wandb", ("trainer.logger",), ("--use-wandb",), "online or offline"),
    Row("observability.wandb_project", ("trainer.project_name",), ("--wandb-project",)),
)
_OURS = {name: (row, whose) for row in ROWS for whose in ("verl", "slime") for name in getattr(row, whose)}


def ours(name: str, keys: Container[str]) -> str:
    """What to say of a name that is theirs, where ours is one of `keys`; "" for any other."""
    row, whose = _OURS.get(name, (None, ""))
    if row is None or row.key not in keys:
        return ""
    return f"{whose}'s name; here it is {row.key}" + (f": {row.how}" if row.how else "")
