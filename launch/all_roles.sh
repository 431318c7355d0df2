#!/usr/bin/env bash
# launch/all_roles.sh RUN_DIR [overrides]   Starts all four roles of a run on this machine, each by its own script.
#
# Example: launch/all_roles.sh runs/demo experiment=demo
# TRAINERS, ROLLOUTS and LANES are the numbers of processes (default 1 each), as trainer.data_parallel, rollout.replicas and
# relay.lanes say. More replicas may join later: launch/rollout.sh.
# Ctrl-C, TERM and HUP become `laminar stop`: the step is finished, a checkpoint written, and the exit code is 0. A second one
# ends them at once. Every death is one line here that says what to do. After that of a relay or rollout the others
# go on, and its own script starts it again; a controller or trainers that die are started again here, at most `restarts`
# times an hour each (default 10), while the others go on. The exit code is 1 if any role failed for good, 2 if the
# configuration is refused.
set -euo pipefail
. "$(dirname "$0")/common.sh"
need_run_dir "$@"
run_dir=$1; shift
python -m laminar_hpc.machine.locks.run_lock "$run_dir"     # a live run is left alone

# all roles would refuse the same: this one says it
laminar train run_dir="$run_dir" "$@" dry_run=true >/dev/null || exit $?

exec python -m laminar_hpc.launch.launch_role controller 1 relay "${LANES:-1}" rollout "${ROLLOUTS:-1}" \
  trainer "${TRAINERS:-1}" run_dir="$run_dir" "$@" </dev/null
