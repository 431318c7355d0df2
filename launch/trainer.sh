#!/usr/bin/env bash
# launch/trainer.sh RUN_DIR [overrides]   Starts the trainers of a run.
#
# TRAINERS is the number of trainer processes: tensor x pipeline x data parallel size, one GPU each (default 1).
# After the death of any of them: the others of this script end, and all are started again here, restarts=N times an hour
# (default 10), unless the same happens twice without a step in between. They load the newest whole checkpoint, and the steps
# since then (checkpoint.every) are trained again. Meanwhile rollouts generate as far as pipeline.max_staleness lets them, and
# the run waits cluster.join_timeout_seconds; until then this script can also be started again by hand with the same arguments.
# Ctrl-C, TERM and HUP are `laminar stop`: the whole run ends in order.
set -euo pipefail
. "$(dirname "$0")/common.sh"
need_run_dir "$@"
start_role trainer "${TRAINERS:-1}" "$@"
