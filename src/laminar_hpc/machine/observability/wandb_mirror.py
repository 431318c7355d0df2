"""Weights & Biases by a flag: the curves that go to TensorBoard, mirrored by the controller. wandb is
optional and imported only here.

Nothing about the machine, its environment, the code or git is sent: the resolved configuration and the
numbers are all. The API key is read by wandb itself, from WANDB_API_KEY or the file of `wandb login`, and
passes through no code or log of ours. What goes wrong after the start is logged once and ends the mirror,
never the run.
"""

import importlib
import importlib.util
import logging
import netrc
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlparse

from laminar_hpc.config.errors import LaminarError

log = logging.getLogger(__name__)
START_SECONDS = 60.0
FINISH_SECONDS = 60.0
STEP = "trainer_step"  # the x axis of all curves: wandb's own step cannot go back after a restore


def check_wandb(mode: str) -> None:
    """Raises LaminarError where `mode` (off, offline, online) cannot work on this machine."""
    if mode == "off":
        return
    if importlib.util.find_spec("wandb") is None:
        raise LaminarError(
            f"observability.wandb={mode} needs the package wandb, which is not "
            "installed here: pip install wandb, or set observability.wandb=off"
        )
    if mode == "online" and not _has_key():
        raise LaminarError(
            "observability.wandb=online found no API key: run `wandb login` or export WANDB_API_KEY on the "
            "controller's machine, or set observability.wandb=offline"
        )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbMirror:
    """One run on Weights & Biases, the same one after a resume. Used by one thread."""

    def __init__(self, run_dir: Path, mode: str, project: str, config: dict) -> None:
        """Raises LaminarError, without the key, when wandb cannot start."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of wandb's own failures, to its makers
        wandb = importlib.import_module("wandb")
        quiet = wandb.Settings(
            silent=True,
            console="off",
            host="-",
            init_timeout=START_SECONDS,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.resolve().name,
                id=_run_id(run_dir),
                resume="allow" if mode == "online" else None,
                dir=str(run_dir),
                mode=mode,
                config=config,
                settings=quiet,
            )
            self._run.define_metric(STEP, hidden=True)
            self._run.define_metric("*", step_metric=STEP)
        except Exception as error:
            raise LaminarError(
                f"observability.wandb={mode}: wandb could not start ({type(error).__name__}: "
                f"{without_key(str(error))}); check network and login, or set observability.wandb=offline"
            ) from None

    def log(self, curves: Iterable[tuple[str, float]], step: int) -> None:
        if self._run is None:
            return
        try:
            self._run.log({**dict(curves), STEP: step})
        except Exception as error:
            said = without_key(f"{type(error).__name__}: {error}")
            log.warning("Weights & Biases gets no more of this run: %s", said)
            self._run = None

    def close(self, failed: bool = False) -> None:
        """Waits at most FINISH_SECONDS for what is still to be sent; it is under run_dir/wandb as well."""
        run = self._run
        self._run = None
        if run is None:
            return
        sender = threading.Thread(target=run.finish, kwargs={"exit_code": int(failed)}, daemon=True)
        sender.start()
        sender.join(FINISH_SECONDS)
        if sender.is_alive():
            what = "all of this run within %.0f s: `wandb sync` sends the rest of wandb/"
            log.warning(f"Weights & Biases did not get {what}", FINISH_SECONDS)


def without_key(text: str) -> str:
    """`text` in which the API key, should a library have put it there, is blotted out."""
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "***") if key else text


def _run_id(run_dir: Path) -> str:
    """Made once per run directory, so that a resumed run goes on under it."""
    file = run_dir / "wandb" / "id"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(6))
    return file.read_text().strip()
