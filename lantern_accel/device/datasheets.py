"""Device profiles: what a device can do at best, each figure with its source.

One TOML file a device. In a checkout they lie in ``profiles/datasheets``, in a wheel inside this package.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from lantern_accel.errors import LanternError, did_you_mean
from lantern_accel.files import read_toml_file
from lantern_accel.records import Frozen, first_wrong


class ProfileError(LanternError):
    """A device profile is missing, damaged, or lacks a source for a figure."""


class Figure(Frozen):
    """One number and where it comes from; its unit is in the field's name."""

    model_config = ConfigDict(allow_inf_nan=False)

    value: Annotated[float, Field(gt=0)]
    kind: Literal["datasheet", "measured", "cited"]
    source: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    """The document, or how it was measured, so that another can find the same number."""


DType = Literal["float32", "tf32", "bfloat16", "float16", "float8"]


class DeviceProfile(Frozen):
    """The limits of one device; what nobody published or measured stays None."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    backend: str
    vendor: str
    model: str
    reports_as: tuple[str, ...] = ()
    """Patterns (``*`` stands for anything) of the names that its driver gives it."""
    peak_flops: Annotated[dict[DType, Figure], Field(min_length=1)]
    """Dense matrix multiplication in FLOP/s, by dtype."""
    reached_flops: dict[DType, Figure] = Field(default_factory=dict)
    """The most that somebody has measured of it."""
    memory_bytes: Figure | None = None
    bandwidth_bytes_per_s: Figure | None = None
    on_chip_bytes: Figure | None = None
    power_w: Figure | None = None

    def matches(self, backend: str, device_name: str) -> bool:
        """Say whether a run by ``backend`` on ``device_name`` ran on this device."""
        name = device_name.casefold()
        patterns = (pattern.casefold() for pattern in self.reports_as)
        return backend == self.backend and any(fnmatchcase(name, one) for one in patterns)

    def figures(self) -> dict[str, Figure]:
        """Return every figure by its name; dtypes are written ``peak_flops.bfloat16``."""
        found: dict[str, Figure] = {}
        for field, value in self:
            if isinstance(value, Figure):
                found[field] = value
            elif isinstance(value, dict):
                found.update({f"{field}.{key}": one for key, one in value.items()})
        return found


def profiles_dir() -> Path:
    """Return the folder of the profiles; raises ProfileError when the installation lacks it."""
    package = Path(__file__).parent.parent
    for folder in (package / "profiles_data", package.parent / "profiles"):
        if folder.is_dir():
            return folder
    raise ProfileError(f"device profiles are missing next to {package}; reinstall lantern-accel")


def profile_names(folder: Path | None = None) -> list[str]:
    """List the devices that have a profile."""
    folder = folder or profiles_dir() / "datasheets"
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_profile(name: str, folder: Path | None = None) -> DeviceProfile:
    """Read one profile by name; raises ProfileError naming the file and the field that is wrong."""
    folder = folder or profiles_dir() / "datasheets"
    names = profile_names(folder)
    if name not in names:
        raise ProfileError(f"no device profile is named {name!r}{did_you_mean(name, names)}")
    path = folder / f"{name}.toml"
    try:
        data = read_toml_file(path)
        profile = DeviceProfile.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{path}: {first_wrong(error)}; correct the file") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not TOML
        raise ProfileError(f"{path} cannot be read: {error}; correct the file") from error
    if profile.name != name:
        raise ProfileError(f"{path}: name: is {profile.name!r}, the file's name says {name!r}")
    return profile


def all_profiles(folder: Path | None = None) -> list[DeviceProfile]:
    """Read every profile; raises ProfileError for the first that is damaged."""
    return [load_profile(name, folder) for name in profile_names(folder)]
