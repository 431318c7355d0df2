"""`make wheel`: what is in dist/, and that an empty environment and an image made from it train the demo."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.paths import ROOT

TORCH = re.compile(r"torch==\S+\+cpu --hash=sha256:[0-9a-f]{64}")


def built(tree: Path, dist: Path) -> Path:
    """The wheel that requirements/wheel.sh builds of `tree`, alone in `dist` with its two files of pins."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", "requirements/wheel.sh", str(dist)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = dist.glob("*.whl")
    assert {path.name for path in dist.iterdir()} == {wheel.name, "cpu.txt", "cuda13.txt"}
    return wheel


def with_hashes(file: Path, sources: tuple[str, ...], wheel: Path) -> None:
    """The file pins each package of requirements/SOURCE.txt once, and the wheel, each with its hashes."""
    blocks = re.findall(
        r"^(\S+)==(\S+)((?: \\\n? +| )--hash=sha256:[0-9a-f]{64}.*(?:\n    .*)*)", file.read_text(), re.M
    )
    found = {name: version for name, version, _ in blocks}
    assert len(found) == len(blocks)
    lines = [
        line for name in sources for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    ]
    wanted = dict(
        line.split(" #")[0].strip().split("==") for line in lines if "==" in line and line[0] != "#"
    )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert digest in file.read_text()
    version = wheel.name.split("-")[1]
    if "torch" not in wanted:
        assert TORCH.search(file.read_text())
        wanted["torch"] = found["torch"]
    assert found == wanted | {"laminar_hpc": version}


def test_the_wheel_holds_the_configuration_and_the_entry_points(tree: Path, tmp_path: Path) -> None:
    """An installed laminar_hpc has inside itself conf/, the examples' models and data, what `laminar init`
    writes (which then runs), its command, and the two places where SGLang looks for us."""
    dist = tmp_path / "dist"
    wheel = built(tree, dist)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(
            next(name for name in names if name.endswith("entry_points.txt"))
        ).decode()
        archive.extractall(tmp_path / "installed")
    shipped = {
        f"laminar_hpc/conf/{path.relative_to(tree / 'conf')}" for path in (tree / "conf").rglob("*.yaml")
    }
    assert shipped and shipped <= names
    template = tree / "src/laminar_hpc/launch/project/template"
    files = {path.relative_to(tree / "src").as_posix() for path in template.rglob("*") if path.is_file()}
    assert len(files) >= 7 and files <= names
    program = f"""
import os, laminar_hpc
from laminar_hpc.launch import cli
assert laminar_hpc.__file__.startswith({str(tmp_path / "installed")!r})
assert cli.run(["init", "mine"]) == 0
os.chdir("mine")
for words in (["experiment=demo"], ["experiment=tools"], ["--config-dir", "conf", "experiment=mine"]):
    assert cli.run(["train", *words, "dry_run=true"]) == 0
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "before a run" not in ran.stdout
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for name, files in {"cpu": ("lock", "nodeps"), "cuda13": ("lock", "torch", "nodeps", "cuda13")}.items():
        with_hashes(dist / f"{name}.txt", files, wheel)
    assert {f"laminar_hpc/{name}.abi3.so" for name in ("_kv", "_sums", "_rows")} <= names
    assert {"laminar_hpc/report/page.css", "laminar_hpc/report/prometheus/grafana.json"} <= names
    for line in (
        "laminar = laminar_hpc.launch.cli:main",
        "laminar_cpu = laminar_hpc.engine.sglang.plugin",
        "laminar_port = laminar_hpc.engine.sglang.plugin",
    ):
        assert line in entry_points


DEMO = ["experiment=demo", "steps=2", "evaluation.files=[]"]


def trains(laminar: list[str], folder: Path) -> None:
    """`laminar` trains two steps of the demo in `folder`, and its audit is clean."""
    ran = subprocess.run([*laminar, "train", *DEMO], cwd=folder, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^step +2/2 +reward +0\.\d", ran.stdout, re.M), ran.stdout
    audit = subprocess.run([*laminar, "audit", "runs/demo"], cwd=folder, capture_output=True, text=True)
    assert audit.returncode == 0 and "clean" in audit.stdout, audit.stdout


@pytest.mark.slow
def test_an_empty_environment_trains_the_demo_from_the_wheel(tmp_path: Path) -> None:
    """Two commands from a bare Python: the pins with the wheel, then the demo, in a folder outside the clone;
    nothing of the clone is on its path."""
    built(ROOT, tmp_path / "dist")
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    command = [python, "-m", "pip", "install", "-q", "--no-deps", "--find-links", tmp_path / "dist"]
    subprocess.run([*command, "-r", tmp_path / "dist/cpu.txt"], check=True, timeout=1800)
    place = "import laminar_hpc; print(laminar_hpc.__file__)"
    said = subprocess.run(
        [python, "-c", place], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(str(tmp_path / "venv"))
    trains([str(tmp_path / "venv/bin/laminar")], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("buildah") and shutil.which("mmdebstrap") and os.geteuid() == 0),
    reason="needs root, buildah and mmdebstrap (Debian's packages)",
)
def test_an_image_is_built_and_trains_the_demo(tmp_path: Path) -> None:
    """The Containerfile, on a base that Debian's own mirror gives. The machine's package settings are lent to
    the build and are not in the image."""
    context = tmp_path / "context"
    (context / "requirements").mkdir(parents=True)
    built(ROOT, context / "dist")
    shutil.copy(ROOT / "Containerfile", context)
    shutil.copy(ROOT / "requirements/image.sh", context / "requirements")
    base = tmp_path / "base.tar"
    subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", str(base)], check=True, timeout=900)
    buildah = [
        "buildah",
        "--root",
        str(tmp_path / "images"),
        "--runroot",
        str(tmp_path / "run"),
        "--storage-driver=vfs",
    ]

    def call(*words: str) -> str:
        done = subprocess.run([*buildah, *words], capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""

    settings = tmp_path / "pip.conf"
    settings.write_text(pip_settings())
    lent = [f"--volume={settings}:/etc/pip.conf:ro"]
    lent += [f"--volume={path}:{path}:ro" for path in ("/etc/apt", "/etc/ssl/certs", *places_of_packages())]
    begun = call("from", "scratch")
    call("add", begun, str(base), "/")
    call("commit", begun, "localhost/bare")
    words = ["--isolation=chroot", "--network=host", *lent]
    call(
        "build",
        *words,
        "--build-arg=BASE=localhost/bare",
        "--build-arg=FOR=cpu",
        "-t",
        "laminar_hpc",
        str(context),
    )
    work = call("from", "--name=tried", "localhost/laminar_hpc")
    run = [*buildah, "run", "--isolation=chroot", f"--volume={tmp_path}/work:/laminar", work, "--", "laminar"]
    (tmp_path / "work").mkdir()
    trains(run, tmp_path / "work")


def pip_settings() -> str:
    """This machine's settings of pip, of files and environment, as one file: a build reaches its indexes."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    pairs = dict(re.findall(r"^(?:.*\.)([\w-]+)='(.*)'$", listed.stdout, re.M))
    pairs.pop("require-virtualenv", None)
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in pairs.items())])


def places_of_packages() -> list[str]:
    """Folders and files of this machine that these settings name."""
    words = {word.removeprefix("file://") for word in re.split(r"[\s=]+|\\n", pip_settings())}
    return sorted(
        word
        for word in words
        if word.startswith("/") and not word.startswith("/etc/ssl/certs") and Path(word).exists()
    )


def test_apptainer_and_containerfile_call_one_script() -> None:
    """Both images are filled by requirements/image.sh from dist/, and run `laminar`."""
    containerfile, definition = ((ROOT / name).read_text() for name in ("Containerfile", "slurm/laminar.def"))
    for text in (containerfile, definition):
        assert "bash /dist/image.sh" in text and "dist /dist" in text and "/opt/laminar/bin:$PATH" in text
    assert re.search(r'^ENTRYPOINT \["laminar"\]$', containerfile, re.M)
    sections = re.findall(r"^%(\w+)\n((?: +.*\n)+)", definition, re.M)
    assert [name for name, _ in sections] == ["files", "post", "environment", "runscript"]
    assert 'exec laminar "$@"' in dict(sections)["runscript"]
    done = subprocess.run(["bash", ROOT / "requirements/image.sh", "cuda99"], capture_output=True, text=True)
    assert done.returncode == 2 and "make wheel" in done.stderr and done.stderr.count("\n") == 1
