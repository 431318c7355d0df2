"""What a batch's rewards and log-probs become: small pure functions, each with its source, chosen by
config.algorithm.

rewards -> shaping -> advantages (once per step, of the whole batch) -> objective = loss x correction + KL
(per micro-batch).
"""
