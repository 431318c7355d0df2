#!/usr/bin/env bash
# launch/relay.sh RUN_DIR [overrides]   Starts the relays of this machine, in a torchrun of their own.
#
# One per machine that has rollouts, on that machine: rollouts read the weights from its shared memory. Started again after
# a death, it asks for the newest weights. With relay.lanes=L there are L, as LANES says (default 1), and machine number n
# starts them with first_index = n x L.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role relay "${LANES:-1}" "$@"
