"""The context of a request: what other threads and a child of a fork find of it."""

from __future__ import annotations

import os
import threading
import warnings

import torch

from lantern_accel.device.context import own_context


def test_a_child_of_a_fork_leaves_the_requests_of_its_parents_threads() -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with own_context():
            held.set()
            go.wait(20)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(20) and torch.get_default_dtype() == torch.float32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks where there are threads
            child = os.fork()
        if not child:
            fine = torch.get_default_dtype() == torch.float64
            with own_context():
                fine = fine and torch.get_default_dtype() == torch.float32
            os._exit(not (fine and torch.get_default_dtype() == torch.float64))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go.set()
        thread.join()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
