"""Models by name: `model.path=OWNER/NAME[@REVISION]` is a model of the Hugging Face hub.

    resolve_model(config, say)   the name becomes one commit, and its config.json is there: all checks can run
    download_model(config, say)  the files that a run needs, whole or not at all; none where they are cached

After `resolve_model` the path in the configuration is the commit's folder in the hub's cache (HF_HOME,
HF_HUB_CACHE). It is a plain Hugging Face directory: nothing else in this package knows of the hub. The
folder's path holds name and commit, so the run's config.yaml pins them; a resumed run takes the same commit.

`laminar train` does both before it starts any rank. Ranks of a bare torchrun do both themselves: the hub's
file locks let one process of a machine download while the others wait. `follow` makes the ranks of other
machines take the controller's commit.
"""

from laminar_hpc.data.pretrained.names import pinned_words, recorded_name
from laminar_hpc.data.pretrained.resolve import download_model, follow, prepare_rank, resolve_model

__all__ = ["download_model", "follow", "pinned_words", "prepare_rank", "recorded_name", "resolve_model"]
