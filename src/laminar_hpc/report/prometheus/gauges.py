"""The gauges of a run, by their names without laminar_, and what each is.

The step's own (step_FIELD, of every number of a step's record) are not listed: docs/metrics.md has them.
"""

RECENT = 20  # steps of which shares and rates are means
# fields of ReplicaLoad: each is replica_FIELD of one replica, and rollout_FIELD, the sum over all
LOADS = {
    "in_flight": "Trajectories without their last token",
    "scoring": "Trajectories whose reward is being computed",
    "running": "Requests that the engine decodes",
    "queued": "Requests that wait in the engine",
    "kv_tokens": "Tokens in the KV cache",
    "kv_capacity": "Tokens that fit into the KV cache",
    "tokens_per_second": "Response tokens per second, of what ended in the last half minute",
}
GAUGES = {
    "run_state": "1 for the state that the run is in, as laminar top says it",
    "start_time_seconds": "When the newest launch began, since the epoch",
    "last_sign_time_seconds": "The last sign of life, since the epoch",
    "steps": "Trainer steps in the weights",
    "steps_wanted": "Trainer steps that the run is to make",
    "tokens_per_second": f"Prompt and response tokens trained per second, over the newest {RECENT} steps",
    "trainer_wait_fraction": f"Share of the newest {RECENT} steps that the trainer waited for batches",
    "step_reward_function_mean": "Mean of each of reward.functions in the newest step, unweighted",
    "publish_bytes_over_full": "Bytes of the newest publication over those of a full copy",
    "publish_changed_fraction": "Share of elements that the newest publication changed",
    "evaluation_accuracy": "Held-out accuracy of the newest evaluation",
    "evaluation_step": "Trainer step of the weights that it evaluated",
    "logprob_mismatch_mean": "Mean |engine - trainer| log-prob with the same weights, in nats",
    "logprob_mismatch_max": "Largest |engine - trainer| log-prob with the same weights, in nats",
    "logprob_mismatch_limit": "Mean mismatch above which the run warns, in nats",
    "groups_generating": "Prompt groups with unfinished trajectories",
    "groups_ready": "Finished prompt groups, for the trainer to take",
    "trajectories_unscored": "Complete responses without a score",
    "evaluations_waiting": "Evaluations under way or due",
    "replicas_waiting": "Replicas that have asked for work and got none yet",
    "trainer_waits": "1 while the trainer has no batch",
    "newest_weight_id": "Newest weight id that a relay holds",
    "ranks": "Processes of each role that are in the run",
    "replicas": "Replicas in each state",
    "rollout_idle_fraction": "Share of replicas that have nothing to do now",
    "replica_state": "1 for the state that a replica is in",
    "replica_weight_step": "Trainer step of the weights that a replica serves",
    **{f"replica_{field}": f"{about}, of one replica" for field, about in LOADS.items()},
    **{f"rollout_{field}": f"{about}, over all replicas" for field, about in LOADS.items()},
}
