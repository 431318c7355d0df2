#!/usr/bin/env bash
# launch/scale.sh HOSTS [overrides]   Starts and ends replicas of a run on machines that ssh reaches.
#
# For a run with rollout.replicas=MIN:MAX and cluster.scale_command="/shared/laminar/launch/scale.sh HOSTS overrides". HOSTS is a
# file with the name of a machine on each line; the overrides are those of the other replicas. The machines see the run's folder
# and this one, and have relays already (launch/relay.sh). Each gets one replica at most, or ROLLOUTS of them.
# The controller adds what it wants as the last words (docs/running.md):
#   start N   on the first N machines that have none and can be reached     stop ID   ends that of the machine ID
#   list      the machines whose replica goes on
# Environment: RUN_DIR, the run's folder; SSH, the command that reaches a machine (default: ssh without questions).
set -euo pipefail
SSH=${SSH:-ssh -n -o BatchMode=yes -o ConnectTimeout=10}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
places=$RUN_DIR/hosts                              # a file for each machine: the process there
mkdir -p "$places"

# there HOST COMMAND: the command gets the words behind it, whatever is in them
there() { $SSH "$1" "$(printf '%q ' bash -c "${@:2}")"; }

goes_on() { # HOST   0: its replica does; 1: it does not; 255: it cannot be reached
  there "$1" 'grep -qzxF "run_dir=$1" "/proc/$2/cmdline" 2>/dev/null' - "$RUN_DIR" "$(cat "$places/$1")"
}

# start HOST [overrides]: its address is the one at which ssh has reached it, unless an override says another.
start() {
  there "$1" '
    cd "$0" && reached=($SSH_CONNECTION) && host=$1 run_dir=$3
    export LAMINAR_REPLICA_ID=$host ROLLOUTS=$2
    setsid launch/rollout.sh "$run_dir" cluster.host="${reached[2]}" "${@:4}" </dev/null >>"$run_dir/logs/host-$host.log" 2>&1 &
    echo $!' "$root" "$1" "${ROLLOUTS:-1}" "$RUN_DIR" "${@:2}" >"$places/$1" || { rm "$places/$1"; return 1; }
}

case ${*: -2:1}:${*: -1} in
  *:list)
    for file in "$places"/*; do
      [ -e "$file" ] || continue
      code=0; goes_on "${file##*/}" || code=$?
      if [ $code = 0 ]; then echo "${file##*/}"; elif [ $code = 1 ]; then rm "$file"; fi
    done ;;
  start:*)
    missing=${*: -1}
    while read -r host; do
      if [ "$missing" = 0 ] || [ -z "$host" ] || [ -e "$places/$host" ]; then continue; fi
      ! start "$host" "${@:2:$#-3}" || missing=$((missing - 1))
    done <"$1"
    [ "$missing" = 0 ] || { echo "$1 has $missing machines too few that are free and can be reached" >&2; exit 1; } ;;
  stop:*)
    host=${*: -1}
    [ -e "$places/$host" ] || exit 0
    ! goes_on "$host" || there "$host" 'kill -TERM "$0"' "$(cat "$places/$host")"
    rm "$places/$host" ;;
  *) echo "laminar: error: scale.sh: the last words are start N, stop ID or list" >&2; exit 2 ;;
esac
