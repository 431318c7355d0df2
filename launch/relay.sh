#!/usr/bin/env bash
# launch/relay.sh RUN_DIR [overrides]   Starts the relays of this machine.
#
# One per machine that has rollouts, on that machine: rollouts read the weights from its shared memory. With relay.lanes=L
# there are L, as LANES says (default 1), and machine number n starts them with first_index = n x L.
# After the death of any of them: the others of this script end too, and the run goes on. The chain of relays closes around
# them. Rollouts of this machine go on with the weights that they have, until pipeline.max_staleness lets them do no more.
# Start it again with the same arguments while the run lasts: it gets the newest weights, and its rollouts pull again.
# Ctrl-C, TERM and HUP end these relays only, with exit code 0.
set -euo pipefail
. "$(dirname "$0")/common.sh"
need_run_dir "$@"
start_role relay "${LANES:-1}" "$@"
