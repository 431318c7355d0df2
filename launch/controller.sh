#!/usr/bin/env bash
# launch/controller.sh RUN_DIR [overrides]   Starts the controller of a run.
#
# Start it first: it writes its address into RUN_DIR, where the others look for it. For roles on several machines give every
# role cluster.host=ADDRESS, an address of this machine that the others can reach, and a RUN_DIR on a file system that all
# of them share (with store_dir=FOLDER on a local disk here).
# After its death: it is started again here, at most `restarts` times an hour (default 10), and the others join it again.
# Meanwhile they go on: trainers on the batch that they have, rollouts on what they were granted, relays as ever. They wait
# cluster.join_timeout_seconds for it; by hand it is started with the same arguments and resume=auto, with store_dir on any
# machine. After an error of its own, which it says, the run has ended: start all roles again with resume=auto.
# Ctrl-C, TERM and HUP are `laminar stop`: the whole run ends in order.
set -euo pipefail
. "$(dirname "$0")/common.sh"
need_run_dir "$@"
start_role controller 1 "$@"
