"""What `huggingface_hub` raises, as one line that says what is wrong and how to mend it."""

from laminar_hpc.config.errors import LaminarError, first_line
from laminar_hpc.pretrained.names import HubName


def silence() -> str:
    """Why no answer of the hub was heard."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE=1 forbids to ask" if constants.is_offline_mode() else "the hub does not answer"


def reason_of(error: Exception) -> str:
    """Why the hub did not answer as it should, in a few words that follow "as" or "and"."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    causes = [error, *(e for e in (error.__cause__, error.__context__) if isinstance(e, Exception))]
    if constants.is_offline_mode() or any(isinstance(e, OfflineModeIsEnabled) for e in causes):
        return "HF_HUB_OFFLINE=1 forbids downloads"
    for e in causes:
        if isinstance(e, GatedRepoError):
            return "the model is gated and this token has no access"
        if isinstance(e, RepositoryNotFoundError):
            return "the hub knows no model of this name, or it is private"
        if isinstance(e, HfHubHTTPError):
            return f"{constants.ENDPOINT} answered with {e.response.status_code}"
        if isinstance(e, httpx.TimeoutException):
            return f"{constants.ENDPOINT} did not answer in time"
        if isinstance(e, httpx.TransportError):
            return f"{constants.ENDPOINT} cannot be reached ({first_line(e)[:160]})"
    return f"{type(error).__name__}: {first_line(error)[:160]}"


def explained(name: HubName, error: Exception, broke_off: bool = False) -> LaminarError:
    """The line for the user. `broke_off`: the hub had answered before."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    key, reason = f"model.path={name.short}", reason_of(error)
    if isinstance(error, GatedRepoError):
        cure = (
            f"accept its terms at https://huggingface.co/{name.repo}, then set HF_TOKEN or run hf auth login"
        )
        return LaminarError(f"{key}: {reason}; {cure}")
    if isinstance(error, RevisionNotFoundError):
        return LaminarError(
            f"{key}: the model has no revision {name.revision}; name a branch, a tag or a commit of it"
        )
    if isinstance(error, RepositoryNotFoundError):
        return LaminarError(
            f"{key}: no such folder here, and {reason}; check the name, or set HF_TOKEN for a private one"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return LaminarError(
            f"{key}: it has no config.json on the hub; name a model in the Hugging Face format"
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return LaminarError(
            f"{key}: {error.filename} cannot be written ({error.strerror}); set HF_HOME to another folder"
        )
    if broke_off and not constants.is_offline_mode():
        return LaminarError(
            f"{key}: the download broke off, as {reason}; start again, finished files are kept"
        )
    return LaminarError(
        f"{key}: no such folder here, not complete in the cache {constants.HF_HUB_CACHE}, "
        f"and {reason}; give this machine access to the hub, or run hf "
        f"download {name.repo} on one that has it and name the folder"
    )
