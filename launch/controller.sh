#!/usr/bin/env bash
# launch/controller.sh RUN_DIR [overrides]   Starts the controller of a run, in a torchrun of its own.
#
# Start it first: it writes its address into RUN_DIR, where the others look for it. For roles on several machines give every
# role cluster.host=ADDRESS, an address of this machine that the others can reach, and a RUN_DIR on a file system that all
# of them share (with store_dir=FOLDER on a local disk here).
# After its death: the run ends. The other roles end by themselves, those on this machine at once, the others within
# cluster.join_timeout_seconds. Start all roles again, each with the same arguments and resume=auto: the run goes on from
# its newest checkpoint, and finished trajectories in the store are kept. Started again alone it finds nobody, and says so.
# Ctrl-C and TERM are `laminar stop`: the whole run ends in order.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role controller 1 "$@"
