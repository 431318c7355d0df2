"""One process of an emulated run: `python -m laminar_hpc.simulator.emulation ROLE RUN_DIR [NUMBERS]`; the
settings are in RUN_DIR/config.yaml.

controller RUN_DIR             the real one
stage RUN_DIR SECONDS          stand-ins for trainer and relay; emulated seconds of training per token
fleet RUN_DIR FIRST COUNT [CONFIG]     real rollout workers with emulated engines, of another kind with
                               settings of their own in the file CONFIG
"""

import asyncio
import logging
import sys
from pathlib import Path

from laminar_hpc.config.load import read_config
from laminar_hpc.machine.observability import output
from laminar_hpc.machine.processes import die_with_parent, machine_name


def main(role: str, run_dir: str, *numbers: str) -> None:
    """One process of an emulated run: `role` with its `numbers`, configured by run_dir/config.yaml."""
    die_with_parent()
    output.guard()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    own = role == "fleet" and len(numbers) > 2
    config = read_config(Path(numbers[2]) if own else Path(run_dir) / "config.yaml")
    if role == "controller":
        from laminar_hpc.controller.run import run
        from laminar_hpc.report.ending import finish

        machine = machine_name(config.relay.shm_dir)
        run(config, 1, machine, lambda text: print(text, flush=True), lambda: None, finish)
    elif role == "stage":
        from laminar_hpc.simulator.emulation import stage

        stage.run(config, float(numbers[0]))
    else:
        from laminar_hpc.simulator.emulation import fleet

        asyncio.run(fleet.run(config, int(numbers[0]), int(numbers[1])))


if __name__ == "__main__":
    main(*sys.argv[1:])
