"""A trainer's profile: of the steps that were asked for, in files that tools read."""

import gzip
import json
from pathlib import Path

import torch

from laminar_hpc.trainer.profiling import StepsProfile


def train(profile: StepsProfile, steps: range) -> None:
    for step in steps:
        with profile.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    """Promise: the first step of a life is left out, and the files hold the next ones alone, with their
    operations; they are there as soon as the last one has ended."""
    profile = StepsProfile(tmp_path / "profile", "trainer0", 5, 2)
    train(profile, range(5, 9))
    trace = json.loads(gzip.decompress((tmp_path / "profile/trainer0.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {name for name in names if name and name.startswith("step ")} == {"step 6", "step 7"}
    assert names.count("aten::mm") == 2
    assert "aten::mm" in (tmp_path / "profile/trainer0.txt").read_text()


def test_a_run_that_ends_before_its_profile(tmp_path: Path) -> None:
    """Promise: what there is is written at the end; nothing without the key, or on a disk that refuses."""
    train(StepsProfile(tmp_path / "none", "trainer0", 0, 0), range(3))
    profile = StepsProfile(tmp_path, "trainer0", 0, 9)
    train(profile, range(3))
    profile.close()
    profile.close()
    assert "aten::mm" in (tmp_path / "trainer0.txt").read_text() and not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    refused = StepsProfile(tmp_path / "file", "trainer0", 0, 1)
    train(refused, range(2))
