"""The tokens of images that are under way, in a file from which the same request goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lantern_accel.files import write_whole
from lantern_accel.generation.request import GenerationRequest

#: Seconds between two writes of the file.
EVERY = 10.0


class Unfinished:
    """The file of one request; what another request, model or precision has left in it is not read.

    An image's name is a digest of all that decides its tokens, its seed among them.
    """

    def __init__(self, path: Path, model: str, request: GenerationRequest) -> None:
        """``model``: what tells models and precisions apart."""
        self.path, self.model, self.request = path, model, request
        self._written = time.monotonic()
        self._found = _read(path)[0]

    def _name(self, image: int) -> str:
        one = self.request
        (seed,), (number,) = one.randomness([image])
        decides = [
            self.model, one.prompts[image // one.num_images], one.negative_prompt, one.size, seed,
            number, one.sampling.model_dump(mode="json"),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def first_tokens(self, images: Sequence[int]) -> Tensor | None:
        """Return the first tokens of images that are all known, integer ``[B, n]``; None for n < 2."""
        rows = [self._found.get(self._name(image), torch.empty(0)) for image in images]
        count = min(len(one) for one in rows)
        return torch.stack([one[:count] for one in rows]) if count > 1 else None

    def note(self, snapshot: Callable[[], Mapping[int, Tensor]]) -> None:
        """Write a snapshot, first tokens by image, as often as :data:`EVERY` says."""
        if time.monotonic() - self._written >= EVERY:
            self.write(snapshot())

    def write(self, tokens: Mapping[int, Tensor]) -> None:
        """Write the first tokens ``[n]`` of images now; nothing where none has two."""
        from safetensors.torch import save

        named = {self._name(i): one.to(torch.int32) for i, one in tokens.items() if len(one) > 1}
        if named:
            write_whole(self.path, save(named, {"seed": str(self.request.seed)}))
        self._written = time.monotonic()


def _read(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """Return what a file holds, and the request's seed; nothing of one that is absent or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            seed = int(file.metadata()["seed"])
            return {name: file.get_tensor(name) for name in file.keys()}, seed  # noqa: SIM118, not a dict
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return {}, None


def seed_in(path: Path) -> int | None:
    """Return the seed of the request that has left a file; None where there is none."""
    return _read(path)[1]
