#!/usr/bin/env bash
# launch/rollout.sh RUN_DIR [overrides]   Starts rollouts on this machine, in a torchrun of their own.
#
# ROLLOUTS is the number of replicas here (default 1); each starts and watches an SGLang server. The replicas of a run are
# numbered: a second script starts with first_index at the number of the first replica that is not started yet.
# After the death of any of them: the others of this script end too, and the run goes on. No finished trajectory is lost;
# what was being generated goes to other replicas, or waits. Start it again with the same arguments while the run lasts, or
# start more. A script for each replica keeps deaths apart; name rollout.devices then, or every script takes the first GPUs.
# Ctrl-C and TERM end these replicas only, within 20 s: what they generate moves to others, and no token is lost. A second
# one, from 3 s on, ends them at once.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role rollout "${ROLLOUTS:-1}" "$@"
