"""Getting published files through the Hugging Face Hub, its cache and its offline mode.

``huggingface_hub`` resumes interrupted downloads and keeps files in its own cache (``HF_HOME``); nothing
is fetched that is there already. Tokens are huggingface_hub's business: none is read or printed here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.filesize import decimal

from lantern_accel.errors import FetchError, ModelError
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import parts_of
from lantern_accel.files import cache_dir, write_whole

Reporter = Callable[[str], None]
#: How long the Hub may take to answer at all.
REACH_SECONDS = 10
#: The option that names a part, up to its path; a model is named with it, since files may not say it.
_OPTIONS = {
    "model": "--model {}=",
    "vq": "--use vq=",
    "drafter": "--use drafter=",
    "text": "--use text-encoder=",
}
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")


def at_hand(entry: ModelEntry) -> bool:
    """Return whether all files of an entry are in the Hub's cache."""
    return all(find_cached(entry.repo, file.path) is not None for file in entry.files)


def find_cached(repo: str, path: str) -> Path | None:
    """Return a repository's file in the Hub's cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, path)
    return Path(found) if isinstance(found, str) else None


def resolve(entry: ModelEntry, tell: Reporter, *, skip: Collection[str] = ()) -> dict[str, Path]:
    """Return where the files of a model and its parts are, fetching what is not in the cache.

    Keys are ``target`` (the entry's own weights) and the kinds of its parts (``vq``, ``drafter``,
    ``text``); kinds in ``skip`` are left out. ``tell`` gets each licence once, and what is fetched.
    Raises :class:`FetchError` where something is neither cached nor can be fetched: with everything
    that is missing, its size, and where to put it.
    """
    wanted = {"target": entry}
    wanted.update({kind: one for kind, one in parts_of(entry).items() if kind not in skip})
    return {kind: fetch(one, tell, wanted.values()) for kind, one in wanted.items()}


def fetch(entry: ModelEntry, tell: Reporter, together: Iterable[ModelEntry] = ()) -> Path:
    """Return the file of an entry, or the folder that holds its files as in the repository.

    ``together``: the entries that are needed with it, for the error where there is no network.
    """
    here = {file.path: find_cached(entry.repo, file.path) for file in entry.files}
    try:
        first = next((path for path, found in here.items() if found is None), None)
        if first is not None:
            reach(entry.repo, first)
        show_licence(entry, tell)
        for file in entry.files:
            if here[file.path] is None:
                tell(f"fetching {file.path} of {entry.repo} ({decimal(file.nbytes)})")
                here[file.path] = download(entry.repo, file.path)
    except Absent as error:
        raise _how_to_get(error, list(together) or [entry]) from None
    name, path = next(iter(here.items()))
    assert path is not None
    return path if len(here) == 1 else path.parents[len(Path(name).parts) - 1]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep huggingface_hub's lines about every retry off the terminal; the outcome is reported."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Absent(Exception):
    """A file that is not cached and cannot be fetched, with the reason."""


def reach(repo: str, path: str) -> None:
    """Raise :class:`Absent` where the Hub cannot be reached.

    One question without retries: a download asks again and again, for half a minute.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        raise Absent("HF_HUB_OFFLINE is set")
    try:
        with _quiet():
            url = huggingface_hub.hf_hub_url(repo, path)
            huggingface_hub.get_hf_file_metadata(url, timeout=REACH_SECONDS)
    except HfHubHTTPError:
        return  # it answered; downloading says what is wrong
    except Exception:
        raise Absent("no network") from None


def download(repo: str, path: str) -> Path:
    """Return a repository's file, fetched; raises :class:`Absent`, ModelError for a licence to accept."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with _quiet():
            return Path(hf_hub_download(repo, path))
    except LocalEntryNotFoundError:
        raise Absent("no network") from None
    except GatedRepoError:
        raise ModelError(
            f"{repo} asks for a licence to be accepted: accept it at "
            f"https://huggingface.co/{repo}, log in with `hf auth login`, and try again"
        ) from None
    except (RepositoryNotFoundError, EntryNotFoundError):
        raise Absent(f"{repo} does not have {path} (any more)") from None
    except Exception as error:
        reason = _TOKEN.sub("hf_...", " ".join(str(error).split()))[:200]
        raise Absent(f"{type(error).__name__}: {reason}") from None


def _how_to_get(error: Absent, wanted: list[ModelEntry]) -> FetchError:
    """Return the error with the commands that fetch what is missing, each into a folder of its own.

    Several of the files have the same name, so that one folder for all would lose some.
    """
    absent = [one for one in wanted if not at_hand(one)]
    size = decimal(sum(one.nbytes for one in absent))
    commands = "".join(
        f"\n  hf download {one.repo} {' '.join(file.path for file in one.files)} "
        f"--local-dir models/{one.name}"
        for one in absent
    )
    named = " ".join(f"{_OPTIONS[one.kind].format(one.name)}models/{one.name}" for one in absent)
    return FetchError(
        f"{wanted[0].name} ({size}) is not here and cannot be fetched ({error}). Where there is a "
        f"network, run:{commands}\nThen copy the folder models here and add {named}"
    )


def show_licence(entry: ModelEntry, tell: Reporter) -> None:
    """Tell an entry's licence, once on this machine."""
    marker = cache_dir() / "licences" / f"{entry.name}.txt"
    if marker.is_file():
        return
    text = f"{entry.name} ({entry.repo}) is under {entry.licence}: {entry.licence_url}"
    tell(text)
    with suppress(OSError):
        write_whole(marker, text + "\n")
