#!/usr/bin/env bash
# launch/all_roles.sh RUN_DIR [overrides]   Starts all four roles of a run on this machine, a torchrun each.
#
# Example: launch/all_roles.sh runs/demo experiment=demo
# TRAINERS, ROLLOUTS and LANES are the numbers of processes (default 1 each), as trainer.data_parallel, rollout.replicas and
# relay.lanes say.
# Ctrl-C and TERM become `laminar stop`: the step is finished, a checkpoint written, and the exit code is 0. A second one
# ends the torchruns at once. A relay or rollout that dies is named and may be started again by its own script; without
# its controller or trainer the run is stopped. The exit code is 1 if any role failed.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
python -m laminar_hpc.cluster.run_lock "$1"     # a live run is left alone
run_dir=$1 here=$(dirname "$0") signals=0 failed=0
declare -A role_of=()         # process id -> role

stop() {
  # `timeout` and some terminals deliver one wish twice at once
  if [ $signals = 1 ] && [ $((SECONDS - asked)) -lt 2 ]; then return; fi
  signals=$((signals + 1)) asked=$SECONDS
  if [ $signals = 1 ]; then laminar stop "$run_dir" || signals=2; fi
  if [ $signals -ge 2 ]; then kill -TERM "${!role_of[@]}" 2>/dev/null || true; fi
}
trap stop INT TERM USR1

for role in controller relay rollout trainer; do
  # its own session, so that Ctrl-C reaches this script only; a parent-death signal, so that it does not outlive it
  setpriv --pdeathsig TERM setsid "$here/$role.sh" "$@" </dev/null &
  role_of[$!]=$role
done

while [ ${#role_of[@]} -gt 0 ]; do
  code=0 ended=; wait -n -p ended "${!role_of[@]}" || code=$?
  [ -n "${ended:-}" ] || continue                 # a trapped signal ended the wait, not a role
  role=${role_of[$ended]}; unset "role_of[$ended]"
  [ $code != 0 ] || continue
  failed=1
  echo "launch: $role ended with exit code $code" >&2
  case $role in
    controller|trainer) [ $signals != 0 ] || stop ;;
    *) echo "launch: the others go on; to start it again: $here/$role.sh $*" >&2 ;;
  esac
done
exit $failed
