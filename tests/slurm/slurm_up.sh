#!/usr/bin/env bash
# slurm_up.sh STATE_DIR [options]     A real Slurm of several nodes on one machine.
#
#   --nodes N        number of nodes, n1..nN                       (4)
#   --cpus C         CPUs declared per node, real or not           (4)
#   --mem MB         memory declared per node, real or not         (8000)
#   --gpus G         fake GPUs per node (links to /dev/null), 0 = none    (4)
#   --partition P    name of the default partition; repeatable     (batch)
#   --gpu-type T     type of the fake GPUs, e.g. h200 (--gres=gpu:h200:2)   (none)
#   --features F     node features, comma-separated (--constraint=)         (none)
#   --prefix S       node name prefix                              (n)
#   --mode M         auto | netns | shared | plain                 (auto)
#                      netns : own network+PID+hostname+mounts per node (CAP_SYS_ADMIN + CAP_NET_ADMIN)
#                      shared: own PID+hostname+mounts, shared loopback (CAP_SYS_ADMIN)
#                      plain : no namespaces (any root); node names go into /etc/hosts, tagged
#   --conf FILE      lines appended to slurm.conf
#   --no-install     fail rather than apt-get what is missing
#
# Everything lives under STATE_DIR; nothing in /etc is touched (but /etc/hosts in plain mode).
# Afterwards:  . STATE_DIR/env.sh ; sbatch ...        Stop: slurm_down.sh STATE_DIR
# A second call on a running STATE_DIR starts only what is not running.
set -euo pipefail
die()  { echo "slurm_up: error: $*" >&2; exit 1; }
say()  { echo "slurm_up: $*" >&2; }
T0=$(date +%s.%N)

[ $# -ge 1 ] || { awk 'NR>1 && !/^#/{exit} NR>1' "$0"; exit 2; }
case $1 in -*) die "first argument is the state folder";; esac
STATE=$1; shift
NODES=4 CPUS=4 MEM=8000 GPUS=4 PREFIX=n MODE=auto EXTRA= INSTALL=1 GPUTYPE= FEATURES= PARTS=()
while [ $# -gt 0 ]; do
  case $1 in
    --nodes) NODES=$2; shift 2;;   --cpus) CPUS=$2; shift 2;;   --mem) MEM=$2; shift 2;;
    --gpus) GPUS=$2; shift 2;;     --prefix) PREFIX=$2; shift 2;; --mode) MODE=$2; shift 2;;
    --conf) EXTRA=$(readlink -f "$2"); shift 2;;
    --gpu-type) GPUTYPE=$2; shift 2;; --features) FEATURES=$2; shift 2;; --partition) PARTS+=("$2"); shift 2;;
    --no-install) INSTALL=0; shift;;
    *) die "unknown option $1";;
  esac
done
[ ${#PARTS[@]} -gt 0 ] || PARTS=(batch)
for v in NODES CPUS MEM GPUS; do [[ ${!v} =~ ^[0-9]+$ ]] || die "--${v,,} wants a number, got '${!v}'"; done
[ "$NODES" -ge 1 ] && [ "$NODES" -le 64 ] || die "--nodes must be 1..64"
[[ $MODE =~ ^(auto|netns|shared|plain)$ ]] || die "--mode auto|netns|shared|plain"
[ "$(id -u)" = 0 ] || die "must run as root"
mkdir -p "$STATE"; STATE=$(cd "$STATE" && pwd -P)
# unix sockets (munge's, slurmstepd's) must fit in 108 bytes
[ ${#STATE} -le 50 ] || die "state folder path is ${#STATE} characters; keep it to 50 (unix sockets: 108 bytes)"
[[ $STATE != *[[:space:]%#\\]* ]] || die "no spaces or %%, #, \\ in the state folder's path"

# ---- one at a time, install -------------------------------------------------------------
exec 9>"$STATE/.lock"; flock -w 120 9 || die "another slurm_up/slurm_down holds $STATE/.lock"
WANT=(munge slurmctld slurmd slurm-client)
[ "$MODE" = plain ] || WANT+=(iproute2 util-linux)
MISS=()
for p in "${WANT[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || MISS+=("$p")
done
if [ ${#MISS[@]} -gt 0 ]; then
  [ $INSTALL = 1 ] || die "missing Debian packages: ${MISS[*]}"
  say "installing ${MISS[*]}"
  # keep the packages' postinst from starting daemons, without leaving a trace
  POL=/usr/sbin/policy-rc.d
  if [ ! -e $POL ]; then
    printf '#!/bin/sh\nexit 101\n' >$POL; chmod 755 $POL; trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${MISS[@]}"; } \
     </dev/null >"$STATE/apt.log" 2>&1 || die "apt-get failed; see $STATE/apt.log: $(tail -3 "$STATE/apt.log")"
  say "installed in $(echo "$(date +%s.%N) - $T0" | awk '{printf "%.1f s", $1-$3}')"
fi
for b in munged mungekey slurmctld slurmd scontrol sinfo; do
  command -v $b >/dev/null || [ -x /usr/sbin/$b ] || die "no $b on PATH after the install"
done
export PATH=$PATH:/usr/sbin:/sbin

VER=$(slurmctld -V | sed -n 's/.* \([0-9][0-9]*\)\.\([0-9][0-9]*\).*/\1\2/p')   # 2205 on Debian 12
[[ $VER =~ ^[0-9]{4}$ ]] || die "cannot read Slurm's version from: $(slurmctld -V)"

# ---- helpers: exact processes by pid + start time ----------------------------------------
RUN=$STATE/run; LOG=$STATE/log; ETC=$STATE/etc
stime() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" {print $20}'; }   # a zombie is not alive
alive() { # pidfile
  local p s; [ -s "$1" ] && read -r p s <"$1" && [ "$(stime "$p")" = "$s" ]
}
launch() { # name cmd...     background, own session, our pid file
  local n=$1; shift
  setsid "$@" >>"$LOG/$n.out" 2>&1 </dev/null 9>&- &
  local p=$!; echo "$p $(stime $p)" >"$RUN/$n.pid"; disown $p
}
port_busy() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# ---- which kind of isolation ------------------------------------------------------------
if [ -s "$STATE/settings" ] && compgen -G "$RUN/*.pid" >/dev/null; then
  say "reusing the settings of $STATE (slurm_down.sh first to change them)"; . "$STATE/settings"
else
  can_ns()  { unshare --mount --uts --pid --fork --kill-child --mount-proc true 2>/dev/null; }
  can_net() { ip netns add slprobe$$ 2>/dev/null && { local r=0
              ip link add slp$$ type veth peer name slq$$ 2>/dev/null && ip link del slp$$ || r=1
              [ $r = 1 ] || { ip link add slb$$ type bridge 2>/dev/null && ip link del slb$$; } || r=1
              ip netns del slprobe$$; return $r; }; }
  if [ "$MODE" = auto ]; then
    if   can_ns && can_net; then MODE=netns; elif can_ns; then MODE=shared; else MODE=plain; fi
  elif [ "$MODE" = netns  ]; then can_ns && can_net || die "--mode netns needs CAP_SYS_ADMIN, CAP_NET_ADMIN, veth and bridge"
  elif [ "$MODE" = shared ]; then can_ns || die "--mode shared needs CAP_SYS_ADMIN"; fi
  NETID=; BR=; FIRST=21000
  if [ "$MODE" = netns ]; then
    NETID=77   # the bridge is the claim: of two that start at once only one can make it
    until ip link add "slbr$NETID" type bridge 2>/dev/null; do
      NETID=$((NETID+1)); [ $NETID -le 190 ] || die "no network is free for another Slurm"
    done
    BR=slbr$NETID FIRST=$((21000 + 100 * (NETID - 77)))
  fi
  for BASE in $(seq "$FIRST" 100 32600); do   # below ip_local_port_range
    ok=1; for k in 0 1 2 3 4; do ! port_busy $((BASE+k)) || ok=0; done; [ $ok = 0 ] || break
  done
  { for v in NODES CPUS MEM GPUS PREFIX MODE NETID BR BASE GPUTYPE FEATURES EXTRA; do printf '%s=%q\n' $v "${!v}"; done
    printf 'PARTS=(%s)\n' "${PARTS[*]@Q}"; } >"$STATE/settings"
fi
mkdir -p "$RUN" "$LOG" "$ETC" "$STATE/munge" "$STATE/ctld" "$STATE/nodes"; chmod 755 "$STATE" "$RUN" "$STATE/munge"
HOST=$(hostname -s)
addr() { [ "$MODE" = netns ] && echo "10.231.$NETID.$((10+$1))" || echo 127.0.0.1; }
CTLADDR=127.0.0.1; [ "$MODE" != netns ] || CTLADDR=10.231.$NETID.1

# ---- configuration ----------------------------------------------------------------------
{
cat <<CONF
ClusterName=local
SlurmctldHost=$HOST($CTLADDR)
SlurmctldPort=$BASE
SlurmdPort=$((BASE+10))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$STATE/munge/munge.sock,cred_expire=6
CredType=cred/munge
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/nodes/%n
SlurmctldPidFile=$RUN/slurmctld.slurmpid
SlurmdPidFile=$RUN/slurmd.%n.slurmpid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# no cgroups, no systemd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
# declared hardware wins over the real one
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=$((MEM/CPUS))
# quick reactions
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,nohold_on_prolog_fail
PriorityType=priority/basic
SlurmctldTimeout=10
SlurmdTimeout=6
MessageTimeout=5
KillWait=5
CompleteWait=0
MinJobAge=3600
InactiveLimit=0
Waittime=0
OverTimeLimit=0
ReturnToService=2
JobRequeue=1
UnkillableStepTimeout=60
# finished jobs: sacct -c
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$STATE/jobcomp.txt
CONF
[ "$GPUS" = 0 ] || echo "GresTypes=gpu"
[ -z "$EXTRA" ] || cat "$EXTRA"
for i in $(seq 1 "$NODES"); do
  n=$PREFIX$i; p=$((BASE+10)); h=$n
  [ "$MODE" = netns ] || p=$((BASE+10+i))
  [ "$MODE" != plain ] || h=$HOST
  g=; [ "$GPUS" = 0 ] || g=" Gres=gpu:${GPUTYPE:+$GPUTYPE:}$GPUS"
  [ -z "$FEATURES" ] || g+=" Feature=$FEATURES"
  echo "NodeName=$n NodeHostname=$h NodeAddr=$(addr $i) Port=$p Sockets=1 CoresPerSocket=$CPUS ThreadsPerCore=1 CPUs=$CPUS RealMemory=$MEM$g State=UNKNOWN"
done
d=YES; for p in "${PARTS[@]}"; do
  echo "PartitionName=$p Nodes=ALL Default=$d MaxTime=INFINITE State=UP"; d=NO; done
} >"$ETC/slurm.conf.new"
mv "$ETC/slurm.conf.new" "$ETC/slurm.conf"
: >"$ETC/gres.conf"; : >"$ETC/plugstack.conf"
# slurmd loads a cgroup plugin whatever the proctrack; autodetect needs a mounted /sys/fs/cgroup (v2: systemd too)
if [ "$VER" -ge 2405 ]; then echo CgroupPlugin=disabled; else echo CgroupPlugin=cgroup/v1; fi >"$ETC/cgroup.conf"
for i in $(seq 1 "$NODES"); do
  n=$PREFIX$i; mkdir -p "$STATE/nodes/$n"
  if [ "$GPUS" -gt 0 ]; then
    mkdir -p "$STATE/gpu/$n"; for k in $(seq 0 $((GPUS-1))); do ln -sfn /dev/null "$STATE/gpu/$n/nvidia$k"; done
    r="[0-$((GPUS-1))]"; [ "$GPUS" -gt 1 ] || r=0
    echo "NodeName=$n Name=gpu${GPUTYPE:+ Type=$GPUTYPE} File=$STATE/gpu/$n/nvidia$r Flags=nvidia_gpu_env" >>"$ETC/gres.conf"
  fi
done
# names every node can resolve; no DNS inside the nodes (c10d waits 15 s on a reverse look-up)
sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$ETC/nsswitch.conf" 2>/dev/null || true
grep -q '^hosts:' "$ETC/nsswitch.conf" || echo 'hosts: files' >>"$ETC/nsswitch.conf"
{ echo "127.0.0.1 localhost"; echo "::1 ip6-localhost"
  echo "$CTLADDR $HOST ctl"
  for i in $(seq 1 "$NODES"); do echo "$(addr $i) $PREFIX$i"; done; } >"$ETC/hosts"
cat >"$STATE/env.sh" <<ENV
export SLURM_CONF=$ETC/slurm.conf
export SLURM_UP_STATE=$STATE
[ $MODE != plain ] || export RES_OPTIONS="timeout:1 attempts:1"
ENV
export SLURM_CONF=$ETC/slurm.conf
if [ "$MODE" = plain ] && ! grep -q "# slurm_up $STATE\$" /etc/hosts; then
  for i in $(seq 1 "$NODES"); do
    echo "127.0.0.1 $PREFIX$i # slurm_up $STATE"; done >>/etc/hosts || die "cannot write /etc/hosts"
fi

# ---- network ----------------------------------------------------------------------------
if [ "$MODE" = netns ]; then
  ip link show "$BR" >/dev/null 2>&1 || ip link add "$BR" type bridge
  ip addr replace "10.231.$NETID.1/24" dev "$BR"; ip link set "$BR" up
  for i in $(seq 1 "$NODES"); do
    ns=sl$NETID-$PREFIX$i
    [ -e "/run/netns/$ns" ] || ip netns add "$ns"
    if ! ip -n "$ns" link show eth0 >/dev/null 2>&1; then
      ip link add "sl${NETID}v$i" type veth peer name eth0 netns "$ns"
      ip link set "sl${NETID}v$i" master "$BR" up
      ip -n "$ns" link set lo up
      ip -n "$ns" addr add "$(addr $i)/24" dev eth0; ip -n "$ns" link set eth0 up
      ip -n "$ns" route add default via "10.231.$NETID.1"
    fi
  done
fi

# ---- what runs as process 1 of each node: starts slurmd, reaps, restarts it on USR1 --------
cat >"$STATE/node_init.sh" <<'INIT'
#!/bin/bash
# node_init.sh STATE NODE MODE
STATE=$1 N=$2 MODE=$3
export SLURM_CONF=$STATE/etc/slurm.conf PATH=$PATH:/usr/sbin:/sbin
export RES_OPTIONS="timeout:1 attempts:1"      # plain mode: a dead DNS server costs 1 s, not 15
if [ "$MODE" != plain ]; then
  hostname "$N" || exit 3
  mount --bind "$STATE/etc/hosts" /etc/hosts || exit 3
  [ ! -e /etc/nsswitch.conf ] || mount --bind "$STATE/etc/nsswitch.conf" /etc/nsswitch.conf
  mount -t tmpfs -o size=${SHM_MB:-4096}m tmpfs /dev/shm || exit 3      # a node's shared memory is its own and goes with its power
fi
child=
start() { [ -n "$child" ] && kill -0 "$child" 2>/dev/null && return
          slurmd -D -N "$N" -f "$SLURM_CONF" & child=$!; }
trap start USR1
trap 'kill $s 2>/dev/null; kill -TERM $child 2>/dev/null && wait $child; exit 0' TERM INT
trap 'kill -KILL $child 2>/dev/null' USR2        # the daemon dies, its jobs live on
start
while :; do sleep 86400 & s=$!; wait $s; kill $s 2>/dev/null; done
INIT
chmod 755 "$STATE/node_init.sh"

start_node() { # i
  local i=$1 n=$PREFIX$1 pre=()
  case $MODE in
    netns)  pre=(ip netns exec "sl$NETID-$n" unshare --mount --uts --pid --fork --kill-child --mount-proc);;
    shared) pre=(unshare --mount --uts --pid --fork --kill-child --mount-proc);;
  esac
  launch "node.$n" "${pre[@]}" "$STATE/node_init.sh" "$STATE" "$n" "$MODE"
}

# ---- start ------------------------------------------------------------------------------
wait_for() { # seconds what cmd...
  local t=$(( $1 * 10 )) what=$2; shift 2
  while ! "$@" >/dev/null 2>&1; do t=$((t-1)); [ $t -gt 0 ] || die "$what did not come up; see $LOG"; sleep 0.1; done
}
if ! alive "$RUN/munged.pid"; then
  M=$STATE/munge
  [ -s "$M/munge.key" ] || (umask 077; mungekey -c -k "$M/munge.key")
  rm -f "$M/munge.sock" "$M/munge.sock.lock"
  launch munged munged --foreground --force --key-file="$M/munge.key" --socket="$M/munge.sock" \
     --pid-file="$M/munged.pid" --log-file="$M/munged.log" --seed-file="$M/munge.seed" --num-threads=4
  wait_for 10 munged munge -n -S "$M/munge.sock"
fi
if ! alive "$RUN/slurmctld.pid"; then
  launch slurmctld slurmctld -D -f "$ETC/slurm.conf"
  wait_for 15 slurmctld sh -c 'scontrol ping | grep -q "is UP"'
fi
for i in $(seq 1 "$NODES"); do alive "$RUN/node.$PREFIX$i.pid" || start_node "$i"; done
all_up() { [ "$(sinfo -h -N -p "${PARTS[0]}" -t idle,alloc,mix,comp -o '%N %t' | grep -vc '\*')" = "$NODES" ]; }
t=0; until all_up; do
  t=$((t+1)); [ $t -lt 300 ] || { sinfo -N -l >&2; for f in "$LOG"/slurmd.*.log; do tail -n 3 "$f" >&2; done; die "not all nodes came up within 30 s; see $LOG"; }
  for i in $(seq 1 "$NODES"); do alive "$RUN/node.$PREFIX$i.pid" ||
    die "node $PREFIX$i ended: $(tail -n 2 "$LOG/node.$PREFIX$i.out")"; done
  sleep 0.1
done
say "mode=$MODE nodes=$NODES up in $(echo "$(date +%s.%N) $T0" | awk '{printf "%.1f s", $1-$2}');  . $STATE/env.sh"
sinfo
