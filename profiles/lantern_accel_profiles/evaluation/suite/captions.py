"""Reads a suite's prompts and real images: COCO's captions, a list, or prompts alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lantern_accel.errors import DataError
from lantern_accel.files import read_json_file, read_text_file, write_whole
from lantern_accel.training.imageset import caption_lines

#: Names that a reason lists at most.
NAMED = 3
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Captioned:
    """Prompts in order, the real image of each (None: there are none), and what was left out."""

    prompts: list[str | int]
    images: list[Path] | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def first(self, count: int | None) -> Captioned:
        """Return the first ``count``; raises :class:`DataError` where there are fewer."""
        there = len(self.prompts)
        if count is not None and count > there:
            gone = f" ({'; '.join(f'{k}: {v}' for k, v in self.left_out.items())})"
            raise DataError(
                f"--count asks for {count} prompts, and there are {there} that can be used"
                f"{gone if self.left_out else ''}; lower it"
            )
        return replace(
            self, prompts=self.prompts[:count], images=self.images and self.images[:count]
        )


def read_captions(
    path: Path, folder: Path, choose: Literal["longest", "first"] = "longest"
) -> Captioned:
    """Read COCO's ``captions_*.json``, or lines of ``{"file": ..., "prompt": ...}``, with their images.

    Of several captions of an image one is used: the longest or the first. Captions without an image and
    images without a caption are left out and counted. Raises :class:`DataError` where nothing is left.
    """
    if not folder.is_dir():
        raise DataError(
            f"--images names {folder}, which is not a folder; name the one of the images"
        )
    chosen: dict[str, str | int] = {}
    for name, caption in _read_list(path):
        kept = chosen.get(name)
        if kept is None or (choose == "longest" and len(str(caption)) > len(str(kept))):
            chosen[name] = caption
    there = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in PICTURES and path.is_file()
    }
    left_out = _count_left_out(
        "captions whose image is not there", [name for name in chosen if name not in there]
    )
    left_out |= _count_left_out(
        "images without a caption", [name for name in there if name not in chosen]
    )
    prompts = {name: caption for name, caption in chosen.items() if name in there}
    if not prompts:
        raise DataError(
            f"no caption in {path} has its image in {folder} ({'; '.join(left_out.values())}); name "
            "the folder that the captions are of"
        )
    return Captioned([*prompts.values()], [there[name] for name in prompts], left_out)


def write_prompts(path: Path, prompts: Sequence[str | int]) -> None:
    """Write a line per image, as ``lantern-accel generate --prompts`` reads them."""
    rows = [{"id": f"{i:06d}", "prompt": prompt} for i, prompt in enumerate(prompts)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, text)


def class_prompts(classes: int, count: int | None, usual: int) -> Captioned:
    """Return class ids in turn, so that any number of images has all classes equally often."""
    return Captioned([i % classes for i in range(usual if count is None else count)])


def _read_list(path: Path) -> list[tuple[str, str | int]]:
    """Return names of images and their captions."""
    try:
        if path.suffix == ".jsonl":
            return [*caption_lines(path, read_text_file(path).splitlines())]
        value = read_json_file(path)
        names = {one["id"]: str(one["file_name"]) for one in value["images"]}
        return [
            (names.get(one["image_id"], f"image {one['image_id']}"), str(one["caption"]).strip())
            for one in value["annotations"]
            if str(one["caption"]).strip()
        ]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); name COCO's captions_val2017.json"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(
            f"{path} is not a list of captions as COCO writes it (images with id and file_name, "
            "annotations with image_id and caption); a .jsonl has a line for each image instead, such as "
            '{"file": "a.png", "prompt": "a red heart"}'
        ) from None


def _count_left_out(what: str, names: Sequence[str]) -> dict[str, str]:
    if not names:
        return {}
    more = ", ..." if len(names) > NAMED else ""
    return {what: f"{len(names)} ({', '.join(names[:NAMED])}{more})"}
