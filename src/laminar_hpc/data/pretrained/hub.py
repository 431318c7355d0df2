"""All that is known of `huggingface_hub`: which commit a name stands for, and a commit's files in the local
cache.

The library honours HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN, writes a file beside its
place and renames it, and locks what it writes. It is imported where it is needed, since most runs name a
directory. Its errors are passed on in one line, with the cure; the token stands in none of them.
"""

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import INDEX_FILE, SIDE_FILES, WEIGHTS_FILE, indexed_files
from laminar_hpc.data.pretrained.names import HubName
from laminar_hpc.machine.observability.console import LABEL_WIDTH, line, size

Say = Callable[[str], None]
_REQUEST_SECONDS = 15.0  # for the hub to answer, and between two parts of a file
_PROGRESS_SECONDS = 30.0  # between lines where there is no terminal to draw a bar on


def commit_of(name: HubName, say: Say) -> str:
    """The commit that `name` stands for now, or, offline, in the cache. Raises LaminarError."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RevisionNotFoundError

    cached = _cached_commit(name)
    if name.is_commit and cached:
        return name.revision
    try:
        with _library() as answers:
            if name.is_commit:  # the library would take it as it is
                HfApi().model_info(name.repo, revision=name.revision)
            commit = str(HfApi().resolve_revision(name.repo, revision=name.revision or None).resolved)
    except Exception as error:  # of httpx, of the library, of the system
        if cached is None or isinstance(error, RevisionNotFoundError):
            raise explained(name, error) from None
        commit, reason = cached, _words_of(error)
    else:
        silent = (
            "HF_HUB_OFFLINE=1 forbids to ask" if constants.is_offline_mode() else "the hub does not answer"
        )
        reason = "" if answers else silent
    if reason:
        say(line("model", f"{name}: taking commit {commit[:12]} from the cache, as {reason}"))
    return commit


def config_of(name: HubName) -> Path:
    """The folder of a commit in the cache, with at least its config.json there. Raises LaminarError."""
    from huggingface_hub import hf_hub_download

    try:
        with _library():
            file = hf_hub_download(
                name.repo, "config.json", revision=name.revision, tqdm_class=_bar(None, name, [])
            )
            return Path(file).parent
    except Exception as error:
        raise explained(name, error) from None


def download(name: HubName, folder: Path, say: Say | None) -> None:
    """Completes the folder of a commit: the tokenizer's files first, then the weights. Raises LaminarError.

    `say` gets a line before and one after; None is for processes that only wait for another one's download.
    """
    if not missing_files(folder) and not _unfinished(name, folder):
        return
    begun = time.monotonic()
    _snapshot(name, [*SIDE_FILES, INDEX_FILE], None)
    if not (folder / "tokenizer.json").is_file():
        raise LaminarError(
            f"model.path={name.short}: it has no tokenizer.json; save its tokenizer in the fast form"
        )
    wanted = weight_files(folder)
    sizes = _sizes(name)
    if absent := [file for file in wanted if file not in sizes]:
        raise LaminarError(
            f"model.path={name.short}: it has no {absent[0]}; "
            "only models with safetensors weights can be trained"
        )
    left = sum(sizes[file] for file in wanted if not (folder / file).is_file())
    _check_room(name, folder, left)
    if say and left:
        say(line("model", f"{name.short}: downloading {size(left)} to {folder.parents[2]}"))
    _snapshot(name, [*SIDE_FILES, INDEX_FILE, *wanted], say)
    if gone := missing_files(folder):
        raise LaminarError(
            f"model.path={name.short}: {folder} lacks {', '.join(gone)} "
            "after the download; delete it, start again"
        )
    if say and left:
        say(line("model", f"{name.short}: downloaded in {time.monotonic() - begun:.0f} s"))


def size_left(name: HubName, folder: Path) -> int:
    """Bytes of weights that `download` would fetch, by the hub's listing; 0 where it cannot be asked."""
    from huggingface_hub import HfApi

    try:
        with _library():
            info = HfApi().model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=_REQUEST_SECONDS
            )
    except Exception:  # a dry run needs no network
        return 0
    left = [f for f in info.siblings or [] if not (folder / f.rfilename).is_file()]
    return sum(f.size or 0 for f in left if "/" not in f.rfilename and f.rfilename.endswith(".safetensors"))


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files: those of the index, or the only one."""
    try:
        return indexed_files(folder) or [WEIGHTS_FILE]
    except ValueError as error:
        raise LaminarError(f"{error}; the model's owner has to mend it") from None


def missing_files(folder: Path) -> list[str]:
    """What a run needs and the folder lacks. Weights are fetched last: where they are, all is."""
    needed = ("config.json", "tokenizer.json", *weight_files(folder))
    return [name for name in needed if not (folder / name).is_file()]


def explained(name: HubName, error: Exception, broke_off: bool = False) -> LaminarError:
    """The library's words, and what helps. `broke_off`: the hub had answered before."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    where = "no such folder here, and of the hub"
    cure = f"give this machine access to it, or run hf download {name.repo} elsewhere and name the folder"
    if isinstance(error, GatedRepoError):
        page = f"https://huggingface.co/{name.repo}"
        cure = f"accept its terms at {page}, then set HF_TOKEN or run hf auth login"
    elif isinstance(error, HfHubHTTPError):
        cure = "check name and revision, or set HF_TOKEN for a private one"
    elif isinstance(error, OSError) and error.filename is not None:
        cure = "set HF_HOME to another folder"
    elif broke_off and not constants.is_offline_mode():
        where, cure = "the download broke off", "start again, finished files are kept"
    return LaminarError(f"model.path={name.short}: {where}: {_words_of(error)}; {cure}")


def _words_of(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = (e for e in (error.__cause__, error.__context__) if isinstance(e, OfflineModeIsEnabled))
    return " ".join(str(next(causes, error)).split()) or type(error).__name__


# ---- the library --------------------------------------------------------------------------------


@contextlib.contextmanager
def _library() -> Iterator[list[int]]:
    """The library with a time limit for every request and without its warnings. Gives the hub's status codes.

    Ctrl-C ends the process at once: the library would first wait for its threads, for as long as the download
    takes. A file that is cut off has another name than a whole one.
    """
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    answers: list[int] = []

    def note(response: Any) -> None:
        answers.append(response.status_code)

    hooks = huggingface_hub.get_session().event_hooks
    hooks["request"].append(_limit)
    hooks["response"].append(note)
    in_main = threading.current_thread() is threading.main_thread()
    earlier = signal.signal(signal.SIGINT, signal.SIG_DFL) if in_main else None
    try:
        yield answers
    finally:
        if in_main:
            signal.signal(signal.SIGINT, earlier)
        hooks["request"].remove(_limit)
        hooks["response"].remove(note)


def _limit(request: Any) -> None:
    """Some of the library's requests have no time limit."""
    limits = request.extensions.setdefault("timeout", {})
    for kind in ("connect", "read", "write", "pool"):
        limits[kind] = limits.get(kind) or _REQUEST_SECONDS


def _snapshot(name: HubName, files: list[str], say: Say | None) -> None:
    import huggingface_hub

    bars: list[Any] = []
    try:
        with _library():
            bar = _bar(say, name, bars)
            huggingface_hub.snapshot_download(
                name.repo, revision=name.revision, allow_patterns=files, tqdm_class=bar
            )
    except Exception as error:
        raise explained(name, error, broke_off=True) from None
    finally:
        for bar in bars:  # the library leaves them open
            bar.close()


def _unfinished(name: HubName, folder: Path) -> bool:
    """Whether the library's own listing of the commit, if it kept one, has files that the folder lacks."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listed = {file.path for file in get_cached_repo_tree(name.repo, revision=name.revision)}
    except CachedRepoTreeNotFoundError:
        return False  # downloaded by an older release
    return any(not (folder / file).is_file() for file in listed & {*SIDE_FILES, INDEX_FILE})


def _sizes(name: HubName) -> dict[str, int]:
    """Bytes of every file of the commit."""
    from huggingface_hub import get_cached_repo_tree

    return {file.path: file.size for file in get_cached_repo_tree(name.repo, revision=name.revision)}


def _cached_commit(name: HubName) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name.repo, "config.json", revision=name.revision or None)
    return Path(cached).parent.name if isinstance(cached, str) else None


def _check_room(name: HubName, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaminarError(
            f"model.path={name.short}: {size(needed)} are to be downloaded, {folder.parents[2]} "
            f"has {size(free)} free; make room there, or name another folder with HF_HOME"
        )


def _bar(say: Say | None, name: HubName, made: list[Any]) -> type:
    """A class for the library's bars, which are added to `made`. Of its three the one that counts bytes is
    shown; without a terminal it is a line now and then."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.said = time.monotonic()
            self.over = False
            hidden = say is None or settings.get("name") != "huggingface_hub.snapshot_download"
            settings |= {
                "desc": f"{'model':<{LABEL_WIDTH}} {name.short}",
                "disable": hidden,
                "bar_format": None,
                "leave": False,
            }
            super().__init__(*args, **settings)
            made.append(self)

        def set_description(self, *_: Any, **__: Any) -> None:
            """Ours stays."""

        def display(self, *args: Any, **settings: Any) -> None:
            if sys.stderr.isatty():
                super().display(*args, **settings)
            elif say and not self.over and time.monotonic() - self.said > _PROGRESS_SECONDS:
                self.said = time.monotonic()
                say(line("model", f"{name.short}: {size(self.n)} of {size(self.total)}"))

        def close(self) -> None:
            self.over = True
            super().close()

    return Bar
