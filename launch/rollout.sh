#!/usr/bin/env bash
# launch/rollout.sh RUN_DIR [overrides]   Starts rollouts on this machine, each a process of its own.
#
# ROLLOUTS is the number of replicas here (default 1); each starts and watches an SGLang server. Start this script on as many
# machines, and at any time of the run, as you like: the controller numbers the replicas, and there may be more than
# rollout.replicas. Several scripts on one machine with GPUs need rollout.devices, or each takes the first ones.
# After the death of one of them: the others go on. No finished trajectory is lost; what it was generating goes on at other
# replicas, from where it was but for the last rollout.increment_tokens. Start another at any time.
# Ctrl-C, TERM and HUP end these replicas only, within 20 s: what they generate moves to others, no token is lost, and the exit
# code is 0. A second one, from 3 s on, ends them at once. It is 1 if one of them has failed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
need_run_dir "$@"
start_role rollout "${ROLLOUTS:-1}" "$@"
