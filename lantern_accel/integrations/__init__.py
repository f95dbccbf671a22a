"""Decodes inside models and pipelines that other libraries have loaded.

``accelerate(thing)`` takes diffusers' ``GlmImagePipeline`` and transformers' Janus; ``restore(thing)``
undoes it. Nothing of either library is imported before it is asked for.
"""

from __future__ import annotations

from typing import Any


def accelerate(thing: object, **settings: Any) -> Any:
    """Let a loaded pipeline or model decode with lantern-accel; returns it.

    ``settings``: ``strategy`` and fields of ``Sampling``, as the library's own module takes them. Raises
    :class:`ModelError` for anything that cannot be accelerated.
    """
    return _door(thing).accelerate(thing, **settings)


def restore(thing: object) -> Any:
    """Undo :func:`accelerate`; returns the pipeline or model."""
    return _door(thing).restore(thing)


def _door(thing: object) -> Any:
    if type(thing).__name__.endswith("Pipeline"):
        from lantern_accel.integrations import diffusers

        return diffusers
    from lantern_accel.integrations import transformers

    return transformers
