#!/usr/bin/env bash
# launch/all_roles.sh RUN_DIR [overrides]   Starts all four roles of a run on this machine, each by its own script.
#
# Example: launch/all_roles.sh runs/demo experiment=demo
# TRAINERS, ROLLOUTS and LANES are the numbers of processes (default 1 each), as trainer.data_parallel, rollout.replicas and
# relay.lanes say. More replicas may join later: launch/rollout.sh.
# Ctrl-C, TERM and HUP become `laminar stop`: the step is finished, a checkpoint written, and the exit code is 0. A second one
# ends the torchruns at once. Every death is one line here that says what to do. After that of a relay or rollout the others
# go on, and its own script starts it again; a controller or trainers that die are started again here, at most `restarts`
# times an hour each (default 10), while the others go on. The exit code is 1 if any role failed for good, 2 if the
# configuration is refused.
set -euo pipefail
if [ $((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1])) -lt 501 ]; then
  echo "laminar: error: launch/all_roles.sh takes bash 5.1 (this is $BASH_VERSION): start each role by its own script" >&2
  exit 2
fi
. "$(dirname "$0")/common.sh"
need_run_dir "$@"
run_dir=$1 here=$(dirname "$0") signals=0 failed=0; shift
python -m laminar_hpc.cluster.run_lock "$run_dir"     # a live run is left alone
declare -A role_of=()         # process id -> role
export LAMINAR_ONE_TERMINAL=1  # so that one of them tells of a death, not all

# all roles would refuse the same: this one says it
laminar train run_dir="$run_dir" "$@" dry_run=true >/dev/null || exit $?

stop() {
  # `timeout` and some terminals deliver one wish twice at once
  if [ $signals = 1 ] && [ $((SECONDS - asked)) -lt 2 ]; then return; fi
  signals=$((signals + 1)) asked=$SECONDS
  if [ $signals = 1 ]; then laminar stop "$run_dir" || signals=2; fi
  if [ $signals -ge 2 ]; then end; fi
}
end() { kill -TERM "${!role_of[@]}" 2>/dev/null || true; }
trap stop INT TERM USR1 HUP

for role in controller relay rollout trainer; do
  # its own session, so that Ctrl-C reaches this script only; a parent-death signal, so that it does not outlive it
  setpriv --pdeathsig TERM setsid "$here/$role.sh" "$run_dir" "$@" </dev/null &
  role_of[$!]=$role
done

while [ ${#role_of[@]} -gt 0 ]; do
  code=0 ended=; wait -n -p ended "${!role_of[@]}" || code=$?
  [ -n "${ended:-}" ] || continue                 # a trapped signal ended the wait, not a role
  role=${role_of[$ended]}; unset "role_of[$ended]"
  [ $code != 0 ] || continue
  failed=1                                        # it has said why
  case $role in
    controller) end ;;
    trainer) laminar stop "$run_dir" >/dev/null 2>&1 || true ;;    # it is not started again, so the run would wait for nobody
  esac
done
exit $failed
