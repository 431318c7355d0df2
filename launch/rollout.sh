#!/usr/bin/env bash
# launch/rollout.sh RUN_DIR [overrides]   Starts rollouts on this machine, in a torchrun of their own.
#
# ROLLOUTS is the number of replicas here (default 1); each starts and watches an SGLang server. A rollout that dies loses
# no finished trajectory, and may be started again, or added, while the run goes on.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role rollout "${ROLLOUTS:-1}" "$@"
