#!/usr/bin/env bash
# slurm_down.sh STATE_DIR [--wipe]    Stops exactly what slurm_up.sh STATE_DIR started (by pid files that
# hold pid + start time), takes its namespaces and links away. --wipe removes the state folder as well.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,3p' "$0"; exit 2; }
[ -d "$1" ] || { echo "slurm_down: no such folder: $1"; exit 0; }
STATE=$(cd "$1" && pwd -P); WIPE=${2:-}
[ -s "$STATE/settings" ] || { echo "slurm_down: $STATE was not made by slurm_up.sh (no settings)" >&2; exit 1; }
exec 9>"$STATE/.lock"; flock -w 60 9 || { echo "slurm_down: $STATE/.lock is held" >&2; exit 1; }
. "$STATE/settings"; RUN=$STATE/run; export SLURM_CONF=$STATE/etc/slurm.conf
stime() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" {print $20}'; }   # a zombie is not alive
alive() { local p s; [ -s "$1" ] && read -r p s <"$1" && [ "$(stime "$p")" = "$s" ]; }
stop() { # name signal grace
  local f=$RUN/$1.pid p s t=0
  if alive "$f"; then
    read -r p s <"$f"; kill -"$2" "$p" 2>/dev/null
    while alive "$f" && [ $t -lt $(($3*10)) ]; do sleep 0.1; t=$((t+1)); done
    if alive "$f"; then echo "slurm_down: $1 ($p) ignored $2; KILL" >&2; kill -KILL "$p"; fi
  fi
  rm -f "$f"
}
if [ "$MODE" = plain ] && alive "$RUN/slurmctld.pid"; then      # no PID namespace: jobs must be ended by Slurm
  timeout 10 scancel --full --signal=KILL --state=RUNNING --user=root 2>/dev/null; timeout 10 scancel --user=root 2>/dev/null
  for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
fi
stop slurmctld TERM 10
for f in "$RUN"/node.*.pid; do
  [ -e "$f" ] || continue; n=$(basename "$f" .pid)
  # namespaced: killing `unshare --kill-child` ends process 1 of the node, hence every process in it
  if [ "$MODE" = plain ]; then stop "$n" TERM 10; else stop "$n" KILL 5; fi
done
stop munged TERM 5
if [ "$MODE" = netns ]; then
  for i in $(seq 1 "$NODES"); do
    [ ! -e "/run/netns/sl$NETID-$PREFIX$i" ] || ip netns del "sl$NETID-$PREFIX$i"
    ip link del "sl${NETID}v$i" 2>/dev/null
  done
  ip link del "$BR" 2>/dev/null
fi
if [ "$MODE" = plain ] && grep -q "# slurm_up $STATE\$" /etc/hosts; then
  T=$(mktemp); grep -v "# slurm_up $STATE\$" /etc/hosts >"$T"; cat "$T" >/etc/hosts; rm -f "$T"   # in place: may be a bind mount
fi
[ "$WIPE" != --wipe ] || rm -rf "$STATE"
echo "slurm_down: stopped"
