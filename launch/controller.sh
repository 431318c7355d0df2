#!/usr/bin/env bash
# launch/controller.sh RUN_DIR [overrides]   Starts the controller of a run, in a torchrun of its own.
#
# Start it first: it writes its address into RUN_DIR, where the others look for it. Started again after a death, it goes on
# from its store. For roles on several machines give every role cluster.host=ADDRESS, an address of this machine that the
# others can reach, and a RUN_DIR on a file system that all of them share (with store_dir=FOLDER on a local disk here).
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role controller 1 "$@"
