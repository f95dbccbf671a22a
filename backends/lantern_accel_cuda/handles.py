"""Streams and events; torch leaves their constructors without types."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Streams of this process by GPU and purpose. torch hands out 32 of them in turn, and cuBLAS keeps a
#: workspace for every one that a product ran on, so that opening a GPU again must not take new ones.
_streams: dict[tuple[str, str], torch.cuda.Stream] = {}


def stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return this process's stream of a GPU for a purpose (``capture``, ``copy``); made once."""
    key = (str(device), purpose)
    if key not in _streams:
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        _streams[key] = make(device)
    return _streams[key]


def event(timing: bool = False) -> torch.cuda.Event:
    """Return a new event, one that carries a time where ``timing``."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return make(enable_timing=timing)
