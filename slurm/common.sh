# slurm/common.sh   Sourced by the job scripts beside it: run_job ROLE [overrides].
#
# One job is one failure domain. The jobs of a run find each other in its folder, RUN_DIR:
#   jobs/ROLE.JOB.RESTARTS        this life of a job goes on; its node
#   jobs/end.JOB.RESTARTS         it is to end: `limit` (USR1, before the time limit), `now` (TERM, preemption), or
#                                 `failed: ...`, what else of the job has
#   jobs/term.JOB.RESTARTS        a node of it was sent TERM; only Slurm knows why
#   jobs/again.JOB.RESTARTS       it has ended in order and has more to do, so it is requeued
#   jobs/queued.trainer           Slurm has the trainers' job in its queue: the controller, which removes the file, waits for it
#   jobs/failed, jobs/ended       the run has failed, or is complete or was stopped by the user: nobody waits for another job
# What runs on the nodes is `python -m laminar_hpc.launch.slurm.node`: it reads `end` and writes the last two.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/site.sh"

AGENTS_AGAIN=10    # agents that were killed are started again so often in one life of the job
QUEUE_SECONDS=20   # between two questions to Slurm, well below cluster.join_timeout_seconds

say() { echo "$(date +%T) laminar: $*" || true; }   # the disk of the log may be full

# with_room COMMAND...: what writes into the run's folder is done again until there is room.
with_room() {
  local why waits=
  until why=$(export LC_ALL=C; "$@" 2>&1); do
    case $why in *"No space left"* | *"quota exceeded"*) ;; *) echo "laminar: error: $why" >&2; return 1 ;; esac
    [ -n "$waits" ] || say "waits for room in $RUN_DIR"
    waits=1
    sleep 1
  done
}

put() { echo "$2" >"$1"; }

# Slurm's own words on this job; an array's first element would get those of all. Asked again while Slurm cannot be reached.
job_field() {
  local line= tries=60
  until line=$(scontrol -o show job "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID ") || [ $((tries -= 1)) = 0 ]; do sleep 1; done
  sed -n "s/.* $1=\([^ ]*\) .*/\1/p" <<<"$line"
}

run_job() {
  role=$1; shift
  RUN_DIR=${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/slurm-$SLURM_JOB_ID}
  for word in "$@"; do case $word in run_dir=*) RUN_DIR=${word#run_dir=} ;; esac; done
  export RUN_DIR STORE_DIR LAMINAR_LIFE=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} LAMINAR_JOB_END
  LAMINAR_JOB_END=$(end_of_time)
  with_room mkdir -p -m 700 "$RUN_DIR" "$RUN_DIR/jobs"
  end=$RUN_DIR/jobs/end.$LAMINAR_LIFE term=$RUN_DIR/jobs/term.$LAMINAR_LIFE
  again=$RUN_DIR/jobs/again.$LAMINAR_LIFE mine=$RUN_DIR/jobs/$role.$LAMINAR_LIFE
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  head=${head%%$'\n'*}                            # not by `head`, which many nodes' names would outlive
  rm -f "$RUN_DIR/jobs"/*."$SLURM_JOB_ID".*       # of earlier lives that were killed
  trap limit_or_now USR1
  trap judge TERM HUP
  trap tidy EXIT
  [ -z "${early:-}" ] || told "$early"            # by a signal that came before
  with_room put "$mine" "$head"
  say "$role on $head$([ "$SLURM_JOB_NUM_NODES" = 1 ] || echo " and $((SLURM_JOB_NUM_NODES - 1)) more nodes"); run $RUN_DIR"
  code=0
  await_others && start_nodes "$@" || code=$?
  if [ "$role" = hetjob ] && [ $code != 0 ]; then rm -f "$again"; fi   # what the others left because of that
  if [ -e "$again" ] || { [ $code = 0 ] && [ "$nothing_began" = told ]; }; then requeue; fi
  if [ $code != 0 ] && has_controller && [ "$(job_field JobState)" = RUNNING ]; then
    rm -f "$mine"                                 # a second one that was refused leaves the first one's jobs alone
    goes_on "$role" || with_room put "$RUN_DIR/jobs/failed" "$(date)"
  fi
  say "$role ended with exit code $code$(by_signal $code)"
  exit $code
}

# Whether this job is the one that others of the run wait for.
has_controller() { [ "$role" = controller ] || [ "$role" = hetjob ]; }

# `mine` of trainers that are requeued stays until their next life: by it the controller's job finds them in the queue.
tidy() {
  local file
  for file in "$RUN_DIR"/jobs/*."$LAMINAR_LIFE"; do
    [ -n "${comes_back:-}" ] && [ "$file" = "$mine" ] || rm -f "$file"
  done
}

# Seconds since 1970 when the time limit comes; empty without one.
end_of_time() {
  date -d "$(job_field EndTime)" +%s 2>/dev/null || true
}

told() {
  local before
  before=$(cat "$end" 2>/dev/null || true)
  if [ -z "$before" ] || { [ "$before" = limit ] && [ "$1" != limit ]; }; then say "told to end ($1)"; with_room put "$end" "$1"; fi
}

# USR1 comes some minutes before the time limit; with PreemptParameters=send_user_signal it comes at preemption in place of TERM,
# and the job's end has been brought forward.
limit_or_now() {
  local comes
  comes=$(end_of_time)
  if [ -n "$comes" ] && { [ -z "$LAMINAR_JOB_END" ] || [ "$comes" -lt $((LAMINAR_JOB_END - 60)) ]; }; then told now; else told limit; fi
}

# TERM at preemption, or by scancel, is to stop; that of a job which Slurm has requeued already, because a node of it died, is not:
# the others go on and wait for its next life.
judge() {
  rm -f "$term"
  if [ "$(job_field Restarts)" = "${SLURM_RESTART_COUNT:-0}" ]; then told now; else comes_back=1; say "this life of the job is over"; fi
}

# Whether a job of this role of the run goes on. A file that a killed job has left does not count, and goes.
goes_on() {
  local file state
  for file in "$RUN_DIR/jobs/$1".*; do
    [ -e "$file" ] || continue
    state=$(squeue -h -o %T -j "$(basename "$file" | cut -d. -f2)" 2>&1) || true
    case $state in
      *RUNNING*) return 0 ;;
      "" | *"Invalid job id"*) rm -f "$file" ;;   # any other error is Slurm's own
    esac
  done
  return 1
}

# Of the controller's job, now and then: whether the trainers' waits for nodes (line/waiting.py).
note_queue() {
  local file
  [ $((SECONDS - ${noted:=0})) -ge "$QUEUE_SECONDS" ] || return 0
  noted=$SECONDS
  for file in "$RUN_DIR"/jobs/trainer.*; do
    [ -e "$file" ] || continue
    case $(squeue -h -o %T -j "$(basename "$file" | cut -d. -f2)" 2>/dev/null || true) in
      *PENDING*) with_room put "$RUN_DIR/jobs/queued.trainer" "$(date)" ;;
    esac
  done
}

# Whether the run is over, as the file `failed` or `ended` says. Jobs that were submitted after that are to go on with it, but not
# one that Slurm has requeued. The minute is for clocks that differ.
over() {
  local file=$RUN_DIR/jobs/$1
  [ -e "$file" ] || return 1
  submitted=${submitted:-$(date -d "$(job_field SubmitTime)" +%s)}
  [ "$file" -nt "$mine" ] || [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || [ "$(stat -c %Y "$file")" -gt $((submitted + 60)) ]
}

# The controller waits until there are trainers and rollouts, the others wait for the controller: jobs leave the queue when they
# like, and the time limits of the roles (cluster.join_timeout_seconds) are for those that have started.
await_others() {
  local what said=-1000
  nothing_began=
  if has_controller && ! over failed && ! over ended; then rm -f "$RUN_DIR/jobs/failed" "$RUN_DIR/jobs/ended"; fi
  while what=$(missing); [ -n "$what" ]; do
    if [ -e "$end" ]; then nothing_began=told; return 0; fi
    if over failed; then say "the run has failed; see the log of its controller"; return 1; fi
    if over ended; then say "the run has ended"; nothing_began=over; return 0; fi
    if [ $((SECONDS - said)) -ge 600 ]; then said=$SECONDS; say "waits for $what"; fi
    sleep 1 & wait $! || true                     # a signal ends the wait
  done
}

missing() {
  case $role in
    controller) for other in ${WAIT_FOR-trainer rollouts}; do goes_on "$other" || { echo "the job of the $other"; return; }; done ;;
    trainer | rollouts)
      if [ ! -e "$RUN_DIR/controller.json" ]; then echo "the controller"; return; fi
      ! compgen -G "$RUN_DIR/jobs/controller.*" >/dev/null || goes_on controller || echo "the job of the controller" ;;
  esac
}

# One process on each node, until all have ended. They are told by the file `end`: srun's own signals reach more than them.
# Of a heterogeneous job, in which rollouts come and go, the end of its controller or of its trainers with an error ends the rest.
start_nodes() {
  [ -z "$nothing_began" ] || return 0
  [ -z "$VENV" ] || export PATH=$VENV/bin:$PATH
  if [ -n "$VENV" ] && ! [ -x "$VENV/bin/python" ]; then
    echo "laminar: error: no python in VENV=$VENV: run make setup there, or set VENV or a container in slurm/site.sh" >&2
    return 2
  fi
  local part code failed=0
  declare -A steps=() killed=() nodes_of=()
  if [ "$role" = hetjob ]; then
    start_step controller "$@"; start_step trainer "$@"; start_step rollouts "$@"
  else
    start_step "$role" "$@"
  fi
  while [ ${#steps[@]} -gt 0 ]; do
    if [ -e "$term" ]; then judge; fi
    if [ "$role" = controller ]; then note_queue; fi
    for part in "${!steps[@]}"; do
      if kill -0 "${steps[$part]}" 2>/dev/null; then continue; fi
      code=0; wait "${steps[$part]}" || code=$?
      unset "steps[$part]"
      if [ $code = 0 ]; then continue; fi
      if was_killed "$part" $code; then
        await_others || return $code
        [ -n "$nothing_began" ] || start_step "$part" "$@"
        continue
      fi
      if [ "$role" != hetjob ]; then failed=$code; continue; fi
      say "$part ended with exit code $code$(by_signal $code)"
      if [ "$part" != rollouts ]; then failed=$code; told "failed: $part ended with exit code $code"; fi
    done
    [ ${#steps[@]} = 0 ] || { sleep 1 & wait $! || true; }   # a signal ends the wait, not the step
  done
  return $failed
}

start_step() { # ROLE [overrides]
  local part=$1 group= nodes cpus
  shift
  if [ "$role" = hetjob ]; then case $part in controller) group=0 ;; trainer) group=1 ;; rollouts) group=2 ;; esac; fi
  nodes=SLURM_JOB_NUM_NODES${group:+_HET_GROUP_$group} cpus=SLURM_CPUS_PER_TASK${group:+_HET_GROUP_$group}
  nodes_of[$part]=${!nodes}
  srun ${group:+--het-group="$group"} -N "${!nodes}" -n "${!nodes}" --ntasks-per-node=1 --cpu-bind=none \
    ${!cpus:+--cpus-per-task="${!cpus}"} --kill-on-bad-exit="$([ "$part" = rollouts ]; echo $?)" \
    ${SRUN[@]+"${SRUN[@]}"} ${CONTAINER[@]+"${CONTAINER[@]}"} python -m laminar_hpc.launch.slurm.node "$part" "$@" &
  steps[$part]=$!
}

# Whether a signal has ended the agent of a part that is not to end: with it went all that it had started. Not of several nodes of
# rollouts, of which the others have gone on, nor of one world, which ends with any of its ranks.
was_killed() { # ROLE CODE
  if [ "$2" -le 128 ] || [ "$1" = all ] || [ -e "$end" ] || [ -n "${comes_back:-}" ]; then return 1; fi
  if [ "$1" = rollouts ] && [ "${nodes_of[$1]}" != 1 ]; then return 1; fi
  [ "$(job_field JobState)" = RUNNING ] || return 1
  killed[$1]=$((${killed[$1]:-0} + 1))
  [ "${killed[$1]}" -le "$AGENTS_AGAIN" ] || return 1
  say "the agent of the $1 has ended with exit code $2$(by_signal "$2"): started again, ${killed[$1]} of $AGENTS_AGAIN times"
}

by_signal() { # CODE
  local name
  if [ "$1" -gt 128 ] && name=$(kill -l $(($1 - 128)) 2>/dev/null); then echo ", killed by SIG$name"; fi
}

# Only a job that runs: one that was cancelled, or whose time is over, stays ended.
requeue() {
  local state
  state=$(job_field JobState)
  if [ "$state" != RUNNING ]; then say "not requeued: the job is $state"; return; fi
  say "requeued, to go on from here"
  trap '' USR1 TERM HUP                               # that of the requeue itself
  if [ "$role" = trainer ]; then comes_back=1; fi
  tidy
  scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}" ||
    say "not requeued: Slurm has refused it; submit again with resume=auto"
}
