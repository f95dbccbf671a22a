"""Decodes inside models and pipelines that other libraries have loaded.

``accelerate(thing)`` takes diffusers' ``GlmImagePipeline`` and transformers' Janus; ``restore(thing)``
undoes it. Nothing of either library is imported before it is asked for.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeVar

Thing = TypeVar("Thing")


def accelerate(thing: Thing, **settings: object) -> Thing:
    """Let a loaded pipeline or model decode with lantern-accel; returns it.

    ``settings``: ``strategy`` and fields of ``Sampling``, as the library's own module takes them. Raises
    :class:`ModelError` for anything that cannot be accelerated.
    """
    made: Thing = _door(thing).accelerate(thing, **settings)
    return made


def restore(thing: Thing) -> Thing:
    """Undo :func:`accelerate`; returns the pipeline or model."""
    own: Thing = _door(thing).restore(thing)
    return own


def _door(thing: object) -> ModuleType:
    if type(thing).__name__.endswith("Pipeline"):
        from lantern_accel.integrations import diffusers

        return diffusers
    from lantern_accel.integrations import transformers

    return transformers
