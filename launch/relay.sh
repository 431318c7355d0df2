#!/usr/bin/env bash
# launch/relay.sh RUN_DIR [overrides]   Starts the relay of this machine, in a torchrun of its own.
#
# One per machine that has rollouts, on that machine: rollouts read the weights from its shared memory. Started again after
# a death, it asks for the newest weights.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role relay 1 "$@"
