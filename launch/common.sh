# launch/common.sh   Sourced by the scripts beside it: start_role ROLE PROCESSES RUN_DIR [overrides].
#
# Becomes a torchrun of its own for one role: its own rendezvous in a file of this machine and an id of its own, so
# that the death of one role's torchrun touches no other. The roles find each other through the run folder.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -d "$root/.venv" ]; then PATH=$root/.venv/bin:$PATH; fi

start_role() {
  local role=$1 processes=$2 run_dir=$3 file meeting; shift 3
  file=$(mktemp); exec {meeting}<>"$file"; rm "$file"     # torchrun's store, nameless: a TCP one listens on all interfaces
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  exec torchrun --nnodes=1 --nproc-per-node="$processes" --rdzv-backend=c10d \
    --rdzv-conf=store_type=file,keep_alive_interval=3600 \
    --rdzv-endpoint="/proc/$$/fd/$meeting" --local-addr=127.0.0.1 \
    --rdzv-id="$role-$(cat /proc/sys/kernel/random/uuid)" -m laminar_hpc role="$role" run_dir="$run_dir" "$@"
}

usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
