"""An emulated run as processes of its own: the controller, the stage (stand-ins for trainer and relay), and
fleets of replicas.

Used by tests and benches. `prepare` makes what such a run reads: a model directory with room for long
responses, and prompts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.config.directories import examples_directory
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig

_STOP_SECONDS = 20.0


def prepare(folder: Path, prompts: int, prompt_tokens: int, max_response_tokens: int) -> RunConfig:
    """A configuration with model and prompts under `folder`; the rest is to be set by the caller."""
    model = folder / "model"
    shutil.copytree(examples_directory("arithmetic/base"), model, dirs_exist_ok=True)
    settings = json.loads((model / "config.json").read_text())
    settings["max_position_embeddings"] = max_response_tokens + prompt_tokens + 2
    (model / "config.json").write_text(json.dumps(settings))
    rows = (json.dumps({"prompt": f"{i:0{prompt_tokens}d}", "answer": "0"}) for i in range(prompts))
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    config = RunConfig(run_dir=str(folder / "run"), role="controller")
    config.model.path = str(model)
    config.data.train = str(folder / "prompts.jsonl")
    config.reward.function = "laminar_hpc.environments.arithmetic.reward"
    config.sampling.max_response_tokens = max_response_tokens
    config.trainer.tokens_per_microbatch = max_response_tokens + prompt_tokens + 2
    config.rollout.engine = "emulated"
    return config


class Emulation:
    """The processes of one run. Fleets of `per_process` replicas each. `kinds`: (settings, replicas) where
    replicas differ, which come to as many as there are."""

    def __init__(
        self,
        config: RunConfig,
        train_seconds_per_token: float,
        per_process: int,
        kinds: Sequence[tuple[RunConfig, int]] = (),
    ) -> None:
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.yaml").write_text(dump_config(config))
        self.log = open(self.run_dir.with_suffix(".log"), "ab")  # noqa: SIM115 (closed by `stop`)
        self.controller = self.start("controller")
        self.stage = self.start("stage", str(train_seconds_per_token))
        self.fleets: dict[int, subprocess.Popen[bytes]] = {}
        begin = 0
        alike: Sequence[tuple[RunConfig | None, int]] = [(None, config.rollout.fewest)]
        for own, count in kinds or alike:
            for first in range(begin, begin + count, per_process):
                self.fleets[first] = self.fleet(first, min(per_process, begin + count - first), own)
            begin += count

    def start(self, role: str, *numbers: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "laminar_hpc.simulator.emulation", role, str(self.run_dir), *numbers]
        return subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def fleet(self, first: int, count: int, own: RunConfig | None = None) -> subprocess.Popen[bytes]:
        """`own`: its settings, where they are not those of the run."""
        words = [str(first), str(count)]
        if own is not None:
            file = self.run_dir / f"fleet-{first}.yaml"
            file.write_text(dump_config(own))
            words.append(str(file))
        return self.start("fleet", *words)

    def wait(self, seconds: float) -> int | None:
        """The controller's exit code, or None when it still runs after so long."""
        try:
            return self.controller.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, patience: float = _STOP_SECONDS) -> None:
        """Ends what is left: the controller asks all to leave; after `patience` seconds they are killed."""
        everyone = [self.controller, self.stage, *self.fleets.values()]
        if self.controller.poll() is None and patience:
            self.controller.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in everyone) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in everyone:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.log.close()
