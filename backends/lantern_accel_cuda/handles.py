"""Streams and events; torch leaves their constructors without types."""

from __future__ import annotations

from collections.abc import Callable

import torch


def stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of a GPU."""
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    return make(device)


def event(timing: bool = False) -> torch.cuda.Event:
    """Return a new event, one that carries a time where ``timing``."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return make(enable_timing=timing)
