#!/usr/bin/env bash
# slurm/scale.sh [sbatch options] slurm/rollouts.sbatch [overrides]   Starts and ends replicas of a run on Slurm.
#
# For a run with rollout.replicas=MIN:MAX; `laminar submit` makes it the run's cluster.scale_command unless that is set, with the
# options and overrides of its other rollouts. The controller adds what it wants as the last words (docs/running.md):
#   start N   submits an array of N elements, of one replica each      stop ID   cancels the element
#   list      the elements of this run that have not ended, with `waiting` behind those in the queue
# It knows arrays; the replicas of a heterogeneous job end with it.
# Environment: RUN_DIR, the run's folder; it is the comment of the jobs, by which they are found again.
set -euo pipefail
comment="laminar $RUN_DIR"
export ROLLOUTS=1

elements() { # prints ID STATE of those of this run
  squeue -h -r -u "$(id -u)" -t PD,R,CF,S,RQ,RH -o '%i %T %k' | while read -r id state text; do
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
  *:list) elements | sed -E 's/ (PENDING|REQUEUED|REQUEUE_HOLD|CONFIGURING)$/ waiting/; s/ [A-Z_]+$//' ;;
  start:*) submit "${*: -1}" "${@:1:$#-2}" ;;
  stop:*)
    found=$(elements)
    case $'\n'$found in *$'\n'"${*: -1} "*) scancel "${*: -1}" ;; esac ;;    # nothing but this run's
  *) echo "laminar: error: scale.sh: the last words are start N, stop ID or list" >&2; exit 2 ;;
esac
