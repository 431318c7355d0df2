#!/usr/bin/env bash
# slurm/scale.sh [sbatch options] slurm/rollouts.sbatch [overrides]   Starts and ends replicas of a run on Slurm.
#
# For a run with rollout.replicas=MIN:MAX; `laminar submit` makes it the run's cluster.scale_command unless that is set, with the
# options and overrides of its other rollouts. The controller adds what it wants as the last words (docs/running.md):
#   start N   submits an array of N elements, of one replica each      stop ID   cancels the element
#   list      the elements of this run that have not ended, with `waiting` behind those in the queue
# Environment: RUN_DIR, the run's folder; it is the comment of the jobs, by which they are found again.
set -euo pipefail
comment="laminar $RUN_DIR"
export ROLLOUTS=1

elements() { # STATES   ID STATE, of this run
  squeue -h -r -u "$(id -u)" -t "$1" -o '%i %T %k' | while read -r id state text; do
    [ "$text" != "$comment" ] || echo "$id $state"
  done
}

submit() { # N [sbatch options] SCRIPT [overrides]
  local word words=() count=$1
  for word in "${@:2}"; do
    case $word in *.sbatch) words+=(--comment="$comment" --array=1-"$count") ;; esac   # behind other options, which it overrules
    words+=("$word")
  done
  exec sbatch "${words[@]}"
}

case ${*: -2:1}:${*: -1} in
  *:list) elements PD,R,CF,S,RQ,RH | sed -E 's/ (PENDING|REQUEUED|REQUEUE_HOLD|CONFIGURING)$/ waiting/; s/ [A-Z_]+$//' ;;
  start:*) submit "${*: -1}" "${@:1:$#-2}" ;;
  stop:*) scancel "${*: -1}" ;;
  *) echo "laminar: error: scale.sh: the last words are start N, stop ID or list" >&2; exit 2 ;;
esac
