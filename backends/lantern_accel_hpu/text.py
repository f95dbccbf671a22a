"""Lets optimum-habana, where it is installed, adapt text encoders of transformers to a Gaudi.

It replaces methods of transformers' classes, T5's among them, for the whole process. In lantern_accel
text encoders alone use transformers, and nothing else uses optimum-habana. Written from release 1.21.2.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import sys
import warnings

from lantern_accel.errors import LanternWarning

PACKAGE = "optimum-habana"


@functools.cache  # once a process, and said once
def adapt() -> bool:
    """Adapt transformers' classes; return whether it did. A warning says why an installed one cannot."""
    try:
        release = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    try:
        reason = misfit()
        if not reason:
            with contextlib.redirect_stdout(sys.stderr):  # it prints where a kernel is missing
                module = importlib.import_module("optimum.habana.transformers.modeling_utils")
                module.adapt_transformers_to_gaudi()
            return True
    except Exception as error:  # whatever its many imports, and its call of pip, raise here
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    warnings.warn(
        f"{PACKAGE} {release} is not used, and text encoders run by torch's operators: {reason}",
        LanternWarning,
        stacklevel=2,
    )
    return False


def misfit() -> str:
    """Return which package is not of the releases that optimum-habana pins; "" where all are."""
    from packaging.requirements import Requirement

    for need in map(Requirement, importlib.metadata.requires(PACKAGE) or ()):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            has = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            return f"it needs {need}, which is not installed"
        if not need.specifier.contains(has, prereleases=True):
            return f"it needs {need.name}{need.specifier}, and {has} is installed"
    return ""
