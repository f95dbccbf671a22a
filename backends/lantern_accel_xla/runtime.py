"""The one place that imports torch_xla; everything else gets it as a :class:`Runtime`.

torch_xla's public functions trace, compile and run; that a compiled program can be run again without
tracing it is what its bridge to torch.compile does, by functions of the extension module ``_XLAC`` that
are not documented. Names and signatures: torch_xla 2.9.0, whose version the extra ``xla`` pins.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_accel.errors import BackendError
from lantern_accel_xla import environment

#: Metrics whose number of samples counts something, and what.
COUNTED = {
    "CompileTime": "compilations",
    "TransferToDeviceTime": "transfers.to_device",
    "TransferFromDeviceTime": "transfers.from_device",
}


class Runtime:
    """torch_xla on one device: tracing, programs, metrics.

    ``sdk``: the package ``torch_xla``; ``client``: the PJRT client that serves, such as CPU or TPU.
    """

    def __init__(self, sdk: Any, device: torch.device, client: str) -> None:
        self.sdk, self.device, self.client = sdk, device, client
        self._c = sdk._XLAC

    @classmethod
    def from_sdk(cls, index: int, cache: str = "") -> Runtime:
        """Import torch_xla and take device ``index``; ``cache``: a folder for compiled programs.

        Raises BackendError where it does not load, has no such device, or has compiled before ``cache``
        was named.
        """
        try:
            import torch_xla
            import torch_xla.core.xla_model
            import torch_xla.runtime as runtime
        except (ImportError, OSError) as error:
            reason = " ".join(str(error).split())
            raise BackendError(
                f"torch_xla does not load: {reason}; {environment.INSTALL}"
            ) from error
        if cache and not torch_xla._XLAC._xla_computation_cache_is_initialized():
            runtime.initialize_cache(cache)
        try:
            count = torch_xla.device_count()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise BackendError(
                f"PJRT starts no device: {reason}; set PJRT_DEVICE to a client of this machine (CPU "
                "is everywhere), and see docs/backends.md"
            ) from error
        if not 0 <= index < count:
            raise BackendError(f"there is no device xla:{index}; PJRT has {count}, from xla:0 on")
        # Products of float32 numbers decide acceptance: a TPU would otherwise make them of bfloat16.
        torch_xla._XLAC._xla_set_mat_mul_precision("highest")
        return cls(torch_xla, torch_xla.device(index), str(runtime.device_type()))

    @property
    def version(self) -> str:
        """The release of torch_xla."""
        return str(self.sdk.__version__)

    # --- running ---------------------------------------------------------------------------------

    def sync(self, *, wait: bool = False) -> None:
        """Compile and launch whatever was traced so far; ``wait``: until it has run."""
        self.sdk.sync(wait=wait)

    def wait(self) -> None:
        """Wait until everything that was launched has run."""
        sys.modules["torch_xla.core.xla_model"].wait_device_ops()

    def strict(self, function: Callable[[], None], name: str) -> Callable[[], None]:
        """Return a function traced at each call, which raises on a host read and a second graph."""
        run: Callable[[], None] = self.sdk.compile(
            function, full_graph=True, name=name, max_different_graphs=1
        )
        return run

    @contextlib.contextmanager
    def tracing(self, name: str) -> Iterator[None]:
        """Trace the block without running it; what would run it, such as a host read, raises."""
        allowed, before = self._c._get_allow_execution(), self._c._get_current_graph_name()
        self._c._set_allow_execution(False)
        self._c._set_current_graph_name(name)
        try:
            yield
        finally:
            self._c._set_allow_execution(allowed)
            self._c._set_current_graph_name(before)

    # --- tensors and the programs that they wait for ---------------------------------------------

    def pending(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it waits for a traced program."""
        found: list[bool] = self._c._check_tensor_need_materialization(list(tensors))
        return found

    def handles(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return what identifies each tensor's memory on the device; none may be pending."""
        found: list[int] = self._c._get_tensors_handle(list(tensors))
        return found

    def data(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors on the same memory as everything that ``tensors`` are computed from."""
        found: list[Tensor] = self._c._get_tensors_xla_device_data_node(list(tensors))[1]
        return found

    def donate(self, tensor: Tensor, yes: bool) -> None:
        """Mark a tensor's memory as one that a program may write its result to."""
        self._c._set_buffer_donation(tensor, yes)

    def program(self, outputs: Sequence[Tensor]) -> bytes:
        """Return the key of the program that computes ``outputs``, donations included."""
        with self._donating():
            key: bytes = self._c._get_graph_hash(list(outputs))
        return key

    def compile(self, outputs: Sequence[Tensor], name: str) -> None:
        """Compile the program that computes ``outputs``, and do not run it; dumps call it ``name``."""
        before = self._c._get_current_graph_name()
        self._c._set_current_graph_name(name)
        try:
            with self._donating():
                self._c._xla_warm_up_cache(list(outputs), [])
        finally:
            self._c._set_current_graph_name(before)

    def forget(self) -> None:
        """Drop what was traced; tensors that waited for it have no value until they get one."""
        self._c._clear_pending_irs(str(self.device))

    def run(self, program: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Launch a compiled program; its outputs, in the order in which they were compiled."""
        found: list[Tensor] = self._c._run_cached_graph(program, list(inputs))
        return found

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        """Give a tensor the memory of ``value``; nothing is copied."""
        self._c._replace_xla_tensor(tensor, value)

    def text(self, outputs: Sequence[Tensor]) -> str:
        """Return the program that computes ``outputs`` as HLO text, before XLA optimises it."""
        return str(self._c._get_xla_tensors_hlo(list(outputs)))

    @contextlib.contextmanager
    def _donating(self) -> Iterator[None]:
        before = self._c._xla_get_enable_alias_with_buffer_donor_config()
        self._c._xla_set_enable_alias_with_buffer_donor_config(True)
        try:
            yield
        finally:
            self._c._xla_set_enable_alias_with_buffer_donor_config(before)

    # --- meters ----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Read counts: compilations, transfers each way, and operators that ran on the host."""
        found = {}
        for metric, name in COUNTED.items():
            data = self._c._xla_metric_data(metric)
            found[name] = 0 if data is None else int(data[0])
        names = [one for one in self._c._xla_counter_names() if one.startswith("aten::")]
        found["fallbacks"] = sum(int(self._c._xla_counter_value(one)) for one in names)
        return found

    def memory(self) -> dict[str, int]:
        """Read ``bytes_used``, ``bytes_limit``, ``peak_bytes_used``; empty where the client has none."""
        try:
            return dict(self._c._xla_memory_info(str(self.device)))
        except RuntimeError:  # the CPU client counts nothing
            return {}

    def kind(self) -> str:
        """Return what the client calls the device, such as ``TPU v5 lite`` or ``cpu``."""
        try:
            return str(self._c._xla_device_kind(str(self.device)))
        except RuntimeError:
            return self.client
