"""CONTAINER of slurm/site.sh: the command before each process on a node, on a real Slurm."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from test_separate_jobs import SMALL

from helpers.paths import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

# enter IMAGE COMMAND...: a stand-in for a container's runtime: IMAGE is the root of what it starts, with the
# host's folders in it
ENTER = """#!/bin/bash
image=$1; shift
echo "$*" >>"$image/calls"
exec unshare --mount bash -c '
  for path in /*; do [ ! -d $path ] || [ -L $path ] || mount --rbind $path $0$path || exit 1; done
  exec chroot "$0" "$@"' "$image" "$@"
"""


def make_image(image: Path) -> None:
    """Where the host's folders go, and one that it does not have."""
    (image / "inside").mkdir(parents=True)
    for path in Path("/").iterdir():
        if path.is_symlink():
            (image / path.name).symlink_to(path.readlink())
        elif path.is_dir():
            (image / path.name).mkdir()


def test_each_part_is_started_in_its_container(three_nodes, tmp_path: Path) -> None:
    """Edited at the top of site.sh only, and without VENV: each role of a job starts by the command, and all
    that it does is inside: the controller's store is in a folder that only the image has."""
    if three_nodes.mode() == "plain":
        pytest.skip("another root needs CAP_SYS_ADMIN")
    scripts, image, enter = tmp_path / "slurm", tmp_path / "image", tmp_path / "enter"
    shutil.copytree(ROOT / "slurm", scripts)
    make_image(image)
    enter.write_text(ENTER)
    enter.chmod(0o755)
    site = (scripts / "site.sh").read_text()
    assert site.count("\nCONTAINER=()") == 1
    (scripts / "site.sh").write_text(site.replace("\nCONTAINER=()", f"\nCONTAINER=({enter} {image})"))
    settings = {
        "RUN_DIR": str(tmp_path / "run"),
        "VENV": "",
        "STORE_DIR": "/inside/store",
        "OMP_NUM_THREADS": "1",
    }
    path = {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
    part, script = "--time=60", str(scripts / "laminar_hetjob.sbatch")
    words = [part, ":", part, ":", part, script, "experiment=demo", "steps=2"]
    job = three_nodes.submit(*words, *SMALL, **settings, **path)
    assert three_nodes.wait(job, 600) == "COMPLETED", three_nodes.output(job)[-3000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    calls = [line.split()[:4] for line in (image / "calls").read_text().splitlines()]
    roles = ("controller", "rollouts", "trainer")
    assert sorted(calls) == [["python", "-m", "laminar_hpc.launch.slurm.node", role] for role in roles]
    assert list((image / "inside/store").rglob("*.sqlite*")) and not Path("/inside").exists()
