# launch/common.sh   Sourced by the scripts beside it: start_role ROLE PROCESSES RUN_DIR [overrides].
#
# Becomes the agent of one role on this machine, which starts its ranks, and for rollouts each by itself, so that the death of one
# role touches no other. The roles find each other through the run folder. What ranks print before they have logs of their own
# goes to RUN_DIR/logs/launch-<role><index>.log, errors to the terminal, one line each.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -d "$root/.venv" ]; then PATH=$root/.venv/bin:$PATH; fi

start_role() {
  local role=$1 processes=$2 run_dir=$3; shift 3
  exec python -m laminar_hpc.launch.launch_role "$role" "$processes" run_dir="$run_dir" "$@"
}

usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }

need_run_dir() {
  [ $# -ge 1 ] || usage
  case $1 in
    -h | --help) usage ;;
    */*) ;;
    -* | *=*)
      echo "laminar: error: $1: the first word is RUN_DIR, the run's folder; usage: launch/$(basename "$0") RUN_DIR [overrides]" >&2
      exit 2 ;;
  esac
}
