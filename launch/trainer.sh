#!/usr/bin/env bash
# launch/trainer.sh RUN_DIR [overrides]   Starts the trainers of a run, in a torchrun of their own.
#
# TRAINERS is the number of trainer processes: tensor x pipeline x data parallel size, one GPU each (default 1). Started
# again after a death with resume=auto, they go on from the newest checkpoint.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role trainer "${TRAINERS:-1}" "$@"
