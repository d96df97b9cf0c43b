"""``python -m cluster.hub_process ORG/NAME``: brings a model from the hub into the hub client's own cache."""

from __future__ import annotations

import os
import sys

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from cluster.errors import ModelError
from cluster.step_protocol import OnProgress, run_steps

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.gguf", "*.tiktoken")


def download(repo_id: str) -> str:
    """The directory of the snapshot.

    Raises:
        ModelError: says why there is none.
    """
    try:
        return str(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(PATTERNS)))
    except GatedRepoError as error:
        raise ModelError(f"{repo_id} is gated: accept its licence on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {repo_id}, or it is private and HF_TOKEN is not set") from error
    except LocalEntryNotFoundError as error:
        why = (
            "HF_HUB_OFFLINE is set"
            if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
            else "the hub cannot be reached"
        )
        raise ModelError(f"{repo_id} is not in the hub client's cache, and {why}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{repo_id} cannot be fetched: {error}") from error


def main(repo_id: str) -> int:
    def work(on_progress: OnProgress) -> str:
        on_progress(f"downloading {repo_id}", 0.0)
        return download(repo_id)

    return run_steps(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
