"""A Hugging Face repository, fetched by `huggingface_hub` into its cache.

That library's environment holds here too: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE. It goes on where a connection breaks, and
whole files that an interrupted command left in the cache are not fetched again.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from telamon.errors import DataError
from telamon.hub.packed.source import packing_of, plain_config
from telamon.hub.safetensors_folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    MORE_TEMPLATES,
    TOKENIZER_FILES,
    WEIGHTS,
    SafetensorsFolder,
    read_json,
)
from telamon.models.hf import config_from_hf

_PATTERNS = (CONFIG, GENERATION_CONFIG, INDEX, "model*.safetensors", *TOKENIZER_FILES, MORE_TEMPLATES)
"""What is fetched: neither pickles nor the second copy of the weights that some repositories hold under other names."""


def open_repository(repository: str, *, revision: str | None = None) -> SafetensorsFolder:
    """Fetch a repository's model and open it.

    Args:
        repository: `organisation/name`.
        revision: a branch, a tag or a commit; none: the main branch.

    Raises:
        ConfigError: no family reads its config.json.
        DataError: it does not exist, may not be read, holds no safetensors, or cannot be reached.
    """
    commit = _check_config(repository, revision)
    folder = Path(_fetch(repository, commit, _PATTERNS))
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        raise DataError(
            f"{repository} holds neither {WEIGHTS} nor {INDEX}. Weights in .bin files are pickles and are not read; choose another "
            "revision or repository. A .gguf file of a repository can be fetched by hand and imported by its path"
        )
    return SafetensorsFolder(folder, origin=f"{repository}@{commit}")


def _check_config(repository: str, revision: str | None) -> str:
    """Refuse a model that cannot be read before gigabytes of it are fetched; gives the commit that `revision` stands for."""
    folder = Path(_fetch(repository, revision, (CONFIG,)))
    if (folder / CONFIG).is_file():
        config, where = read_json(folder / CONFIG), f"{repository}: {CONFIG}"
        packing_of(config, where=where)
        config_from_hf(plain_config(config), source=where)
    return folder.name  # a snapshot is named by its commit


def _fetch(repository: str, revision: str | None, patterns: Iterable[str]) -> str:
    import huggingface_hub
    from huggingface_hub import constants, errors

    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    where, named = f"{repository} at {endpoint}", f"revision {revision or constants.DEFAULT_REVISION}"
    try:
        return huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns), endpoint=endpoint)
    except errors.GatedRepoError as error:
        raise DataError(
            f"{where} is gated: accept its terms on the page {endpoint}/{repository}, "
            f"and set HF_TOKEN to a token of that account{_if_token_is_set()}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"there is no repository {where}, or it is private or gated and needs a token: set HF_TOKEN{_if_token_is_set()}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{where} has no {named}; --revision takes a branch, a tag or a commit of the repository") from error
    except errors.LocalEntryNotFoundError as error:  # the hub did not answer, and the library fell back on its cache
        raise DataError(
            f"{where} cannot be reached ({_first_line(error)}), and its {named} is not in the cache {constants.HF_HUB_CACHE}. "
            "Offline, a folder with the model's files can be imported by its path"
        ) from error
    # A connection that broke for good (httpx's error or httpx2's, as the version of the library has it), or a disk that is full.
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise DataError(
            f"{where} could not be fetched whole: {_first_line(error)}. Run the command again: files already whole in "
            f"{constants.HF_HUB_CACHE} are kept"
        ) from error


def _if_token_is_set() -> str:
    return " (the one that is set was not accepted)" if os.environ.get("HF_TOKEN") else ""


def _first_line(error: BaseException) -> str:
    """What an error says of its first cause, in one line: the library's own messages fill a screen."""
    cause = error.__cause__ or error
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__).rstrip(".")
