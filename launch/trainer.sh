#!/usr/bin/env bash
# launch/trainer.sh RUN_DIR [overrides]   Starts the trainers of a run, in a torchrun of their own.
#
# TRAINERS is the number of trainer processes: tensor x pipeline x data parallel size, one GPU each (default 1).
# After the death of any of them: the run ends, all roles. Start all of them again, each with the same arguments and
# resume=auto: the run goes on from its newest checkpoint, and finished trajectories in the store are kept. The steps since
# that checkpoint (checkpoint.every) are trained again. Trainers cannot join a run that goes on.
# Ctrl-C and TERM are `laminar stop`: the whole run ends in order.
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
start_role trainer "${TRAINERS:-1}" "$@"
