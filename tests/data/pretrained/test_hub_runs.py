"""Whole runs of a model that is named as on the hub."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from helpers.models.hub_server import REPO, Hub
from laminar_hpc.data.pretrained import recorded_name

WEIGHTS = "model.safetensors"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_and_its_resume_use_one_commit(hub: Hub, tmp_path: Path):
    """Promise: `laminar train` downloads, trains and pins. After the branch has moved and the cache is gone,
    the ranks of a bare torchrun go on with the same commit, of which one of them fetches the weights; no
    token is in any file."""
    hub.token = "hf_secret"
    environment = {**os.environ, "HF_TOKEN": hub.token, "OMP_NUM_THREADS": "1"}
    words = [
        "experiment=demo",
        f"model.path={REPO}",
        f"run_dir={tmp_path}/run",
        "evaluation.files=[]",
        "checkpoint.every=1",
    ]
    words += ["sampling.max_response_tokens=48", "observability.show_samples=2"]
    begun = hub.branches["main"]

    def start(*command: str) -> str:
        """The weights come slowly until the first rank, which may come last, has said that they do."""
        hub.seconds_per_part = 10.0
        hub.hurry.clear()
        with (
            open(tmp_path / "errors", "w+") as errors,
            subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            late = threading.Timer(240, process.kill)
            late.start()
            printed = ""
            for line in process.stdout:
                printed += line
                if "downloading" in line:
                    hub.hurry.set()
            late.cancel()
        assert process.returncode == 0, printed + (tmp_path / "errors").read_text()
        return printed

    printed = start("laminar_hpc.launch.cli", "train", *words, "steps=2")
    assert (
        "downloading 1.8 MB" in printed
        and sum(line.startswith("sample ") for line in printed.splitlines()) == 4
    )
    hub.push({**hub.commits[begun], WEIGHTS: b"newer, and no weights at all"})
    shutil.rmtree(tmp_path / "cache")
    torchrun = ("torch.distributed.run", "--nproc-per-node=4", "-m", "laminar_hpc")
    printed = start(*torchrun, *words, "steps=3", "resume=auto")
    assert printed.count("downloading 1.8 MB") == 1 and "step 3/3" in printed
    assert hub.gets[WEIGHTS] == 2, "once per cache"

    path = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["path"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines if line["kind"] == "start"] == [f"{REPO}@{begun}"] * 2
    assert str(recorded_name(path)) == f"{REPO}@{begun}"
    texts = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not any(hub.token.encode() in text for text in texts)
