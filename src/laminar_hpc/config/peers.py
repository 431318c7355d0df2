"""What verl, slime and TRL call our keys, for whoever brings a command line of theirs: a refusal names ours.

A test keeps the tables of docs/week_one.md to these rows."""

from collections.abc import Container, Iterator
from typing import NamedTuple


class PeerKey(NamedTuple):
    """`key` is ours; `how` says what its value is, where that is not theirs unchanged."""

    key: str
    verl: tuple[str, ...]
    slime: tuple[str, ...]
    how: str


def _cells(table: str) -> Iterator[list[str]]:
    return ([" ".join(cell.split()) for cell in line.split("|")] for line in table.strip().splitlines())


# ours | verl's | slime's | how
_ROWS = """
model.path | actor_rollout_ref.model.path | --hf-checkpoint |
data.train | data.train_files | --prompt-data | one file, folder or dataset
evaluation.files | data.val_files | --eval-prompt-data | a list: [a.jsonl,b.jsonl]
data.prompt_field | data.prompt_key | --input-key |
data.answer_field | | --label-key | of verl's rows reward_model.ground_truth
data.chat_template | | --apply-chat-template | true, as verl always does
data.chat_template_arguments | data.apply_chat_template_kwargs | --apply-chat-template-kwargs | a table, as \
    {enable_thinking: false}
data.max_prompt_tokens | data.max_prompt_length | --rollout-max-prompt-len |
data.too_long | data.filter_overlong_prompts data.truncation | | drop or refuse
sampling.max_response_tokens | data.max_response_length | --rollout-max-response-len |
sampling.temperature | ROLLOUT.temperature | --rollout-temperature |
algorithm.prompts_per_step | data.train_batch_size | --rollout-batch-size |
algorithm.samples_per_prompt | ROLLOUT.n | --n-samples-per-prompt |
algorithm.minibatches_per_step | ACTOR.ppo_mini_batch_size | --global-batch-size --num-steps-per-rollout | \
    updates per step: how many mini-batches a step's batch is divided into
trainer.tokens_per_microbatch | ACTOR.ppo_max_token_len_per_gpu ACTOR.ppo_micro_batch_size_per_gpu | \
    --max-tokens-per-gpu --micro-batch-size | in tokens; packing is always on
algorithm.advantage | algorithm.adv_estimator | --advantage-estimator | grpo, rloo, reinforce_pp or \
    reinforce_pp_baseline; gspo and cispo are algorithm.loss
algorithm.normalize_std | algorithm.norm_adv_by_std_in_grpo | --disable-grpo-std-normalization | false turns \
    it off
algorithm.clip_low | ACTOR.clip_ratio_low | --eps-clip |
algorithm.clip_high | ACTOR.clip_ratio_high | --eps-clip-high |
algorithm.clip_dual | ACTOR.clip_ratio_c | --eps-clip-c |
algorithm.loss_aggregation | ACTOR.loss_agg_mode | --calculate-per-token-loss | tokens (token-mean), \
    sequences (seq-mean-token-mean) or constant (seq-mean-token-sum-norm)
algorithm.kl_coefficient | ACTOR.kl_loss_coef algorithm.kl_ctrl.kl_coef ACTOR.use_kl_loss | --kl-loss-coef \
    --kl-coef --use-kl-loss | 0 = none; in the reward with algorithm.kl_in_reward=true
algorithm.kl_in_reward | algorithm.use_kl_in_reward | | beside algorithm.kl_coefficient
algorithm.kl_estimator | ACTOR.kl_loss_type | --kl-loss-type | k1, k2 or k3 (low_var_kl)
algorithm.zero_variance | algorithm.filter_groups.enable | --dynamic-sampling-filter-path | filter
algorithm.importance_weight_cap | algorithm.rollout_correction.rollout_is_threshold | --tis-clip --use-tis | \
    a number, with algorithm.proximal=recomputed
optimizer.lr | ACTOR.optim.lr | --lr |
optimizer.weight_decay | ACTOR.optim.weight_decay | --weight-decay |
optimizer.warmup_steps | ACTOR.optim.lr_warmup_steps | |
optimizer.clip_grad | ACTOR.grad_clip | --clip-grad |
trainer.tensor_parallel | ACTOR.megatron.tensor_model_parallel_size | --tensor-model-parallel-size |
trainer.pipeline_parallel | ACTOR.megatron.pipeline_model_parallel_size | --pipeline-model-parallel-size |
trainer.context_parallel | ACTOR.megatron.context_parallel_size ACTOR.ulysses_sequence_parallel_size | \
    --context-parallel-size |
trainer.virtual_stages | ACTOR.megatron.virtual_pipeline_model_parallel_size \
    | --num-layers-per-virtual-pipeline-stage | chunks of each stage, not layers of a chunk
trainer.data_parallel | trainer.n_gpus_per_node trainer.nnodes | --actor-num-gpus-per-node --actor-num-nodes \
    | the trainer's GPUs over tensor_parallel x context_parallel x pipeline_parallel
rollout.tensor_parallel | ROLLOUT.tensor_model_parallel_size | --rollout-num-gpus-per-engine |
rollout.replicas | rollout.n_gpus_per_node rollout.nnodes | --rollout-num-gpus | the rollouts' GPUs over \
    rollout.tensor_parallel
rollout.kv_cache_tokens | ROLLOUT.gpu_memory_utilization | --sglang-mem-fraction-static | in tokens; \
    dry_run=true says whether it fits
rollout.max_concurrent | ROLLOUT.max_num_seqs | --sglang-max-running-requests |
pipeline.max_staleness | async_training.staleness_threshold | | in trainer steps
reward.function | custom_reward_function.path custom_reward_function.name | --custom-rm-path --rm-type | \
    MODULE.NAME; verl's functions run unchanged with reward.style=verl
environment.tools | ROLLOUT.multi_turn.tool_config_path | --custom-generate-function-path | Python \
    functions; or environment.factory, environment.agent
environment.max_turns | ROLLOUT.multi_turn.max_assistant_turns | |
steps | trainer.total_training_steps trainer.total_epochs | --num-rollout --num-epoch | trainer steps; an \
    epoch is prompts / algorithm.prompts_per_step of them
evaluation.every | trainer.test_freq | --eval-interval | 0 = before and after only
checkpoint.every | trainer.save_freq | --save-interval |
checkpoint.keep | trainer.max_actor_ckpt_to_keep | |
run_dir | trainer.default_local_dir trainer.experiment_name | --save |
resume | trainer.resume_mode | --load | auto or never
observability.wandb | trainer.logger | --use-wandb | online or offline
observability.wandb_project | trainer.project_name | --wandb-project |
"""
ROWS = [
    PeerKey(key, tuple(verl.split()), tuple(slime.split()), how)
    for key, verl, slime, how in _cells(
        _ROWS.replace("ACTOR.", "actor_rollout_ref.actor.").replace("ROLLOUT.", "actor_rollout_ref.rollout.")
    )
]
_SAME = """
    model_name_or_path=model.path dtype=model.dtype shuffle_dataset=data.shuffle
    temperature=sampling.temperature max_completion_length=sampling.max_response_tokens
    num_generations=algorithm.samples_per_prompt beta=algorithm.kl_coefficient
    epsilon=algorithm.clip_low epsilon_high=algorithm.clip_high
    delta=algorithm.clip_dual learning_rate=optimizer.lr weight_decay=optimizer.weight_decay
    warmup_steps=optimizer.warmup_steps max_grad_norm=optimizer.clip_grad adam_beta1=optimizer.beta1
    adam_beta2=optimizer.beta2 adam_epsilon=optimizer.eps vllm_tensor_parallel_size=rollout.tensor_parallel
    max_steps=steps save_steps=checkpoint.every save_total_limit=checkpoint.keep output_dir=run_dir
    gradient_checkpointing=trainer.recompute_activations
"""
_NOT_SAME = """
train_dataset dataset_name | data.train | a file, a folder or OWNER/NAME
eval_dataset | evaluation.files | a list: [a.jsonl,b.jsonl]
chat_template_kwargs | data.chat_template_arguments | a table; with data.chat_template=true
max_prompt_length | data.max_prompt_tokens | longer ones are refused, or dropped with data.too_long
per_device_train_batch_size gradient_accumulation_steps generation_batch_size | algorithm.prompts_per_step | \
    in prompts; TRL counts samples, num_generations of each prompt
steps_per_generation | algorithm.minibatches_per_step | updates per step
num_iterations | algorithm.minibatches_per_step | updates per step; each sample is trained once
loss_type | algorithm.loss_aggregation | tokens (dapo), sequences (grpo) or constant (dr_grpo)
importance_sampling_level | algorithm.loss | gspo for sequence, clip for token
scale_rewards | algorithm.normalize_std | true for group, false for none
vllm_importance_sampling_cap | algorithm.importance_weight_cap | with algorithm.proximal=recomputed
reward_funcs | reward.function | MODULE.NAME, with reward.style=trl; several: reward.functions
reward_weights | reward.functions | {NAME: {function: MODULE.NAME, weight: 0.5, style: trl}}
tools | environment.tools | dotted paths of functions
environment_factory | environment.factory | the dotted path of the class
max_tool_calling_iterations | environment.max_turns | answers of the model, one more than iterations
lr_scheduler_type | optimizer.schedule | constant, linear or cosine, after optimizer.warmup_steps
vllm_gpu_memory_utilization | rollout.kv_cache_tokens | in tokens; dry_run=true says if it fits
num_train_epochs | steps | an epoch is prompts / algorithm.prompts_per_step of them
eval_steps | evaluation.every | 0 = before and after only
resume_from_checkpoint | resume | auto or never
report_to | observability.wandb | online or offline
"""
# of GRPOConfig, its base, GRPOTrainer and TRL's command line: ours, and what its value is
TRL = {name: (key, "") for name, key in (pair.split("=") for pair in _SAME.split())} | {
    name: (key, how) for names, key, how in _cells(_NOT_SAME) for name in names.split()
}
_OURS = {name: (row, whose) for row in ROWS for whose in ("verl", "slime") for name in getattr(row, whose)}


def ours(name: str, keys: Container[str]) -> str:
    """What to say of a name that is theirs, where ours is one of `keys`; "" for any other."""
    row, whose = _OURS.get(name, (None, ""))
    key, how = (row.key, row.how) if row else TRL.get(name.removeprefix("--"), ("", ""))
    return f"{whose or 'TRL'}'s name; here it is {key}" + (f": {how}" if how else "") if key in keys else ""
