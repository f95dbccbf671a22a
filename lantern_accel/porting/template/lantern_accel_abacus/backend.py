"""The opened Abacus: torch's CPU with the reference operations, until ``DEVICE`` names your device.

Whatever is not written here has a reference implementation that is correct on any device torch knows.
CHECKLIST.md says what to override first.
"""

from __future__ import annotations

import torch

from lantern_accel.device import Backend, DeviceFacts

#: What torch calls your device: "npu" where you would write torch.device("npu", 0).
DEVICE = "cpu"


class DeviceBackend(Backend):
    """One opened device."""

    name = "abacus"
    version = "0.1.0"

    def __init__(self, index: int) -> None:
        # The CPU has no index; write torch.device(DEVICE, index) for a device that has.
        super().__init__(torch.device(DEVICE) if DEVICE == "cpu" else torch.device(DEVICE, index))

    def facts(self) -> DeviceFacts:
        """Describe the device; what is not known stays out."""
        return DeviceFacts(
            backend=self.name, device=str(self.device), name="Abacus", torch=torch.__version__
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes the device computes in, the best one for decoding first."""
        return (torch.float32,)

    def synchronize(self) -> None:
        """Wait until the device has done all the work given to it."""
        if self.device.type != "cpu":  # which has done it when a call returns
            torch.accelerator.synchronize(self.device)

    # --- what you may override --------------------------------------------------------------------
    #
    # What follows is the rest of the interface: remove the `# ` of what your device does
    # better. Each body calls the reference, so that every part works while you write another.
    # CHECKLIST.md says what pays first, and `lantern-accel conform abacus` checks it.
    #
    # Shapes: R rows (images times branches of guidance, as [conditional; unconditional]), T
    # positions of a pass, H heads, d width of a head, L slots of a cache that a pass looks at,
    # B images, V codes. Tensors are on the device and of the model's dtype; logits and
    # probabilities are float32; token ids, positions and slots have the dtype `index`. Shapes
    # never depend on values, and the host reads none. Types are those of lantern_accel.device
    # and its modules; Tensor and nn are torch's.

    # # Images decoded together unless a request says otherwise.
    # default_batch: int = 8

    # # Rows that a pass is expected to have at about the cost of one; with guidance every token
    # # has two. Windows of a batch whose length nobody chose have about so many. None: what rows
    # # cost is measured on the model where it is first needed, and default trees follow it too;
    # # for devices that compile no shapes.
    # free_rows: int | None = 64

    # # Whether a product with weights in fewer bits takes less time than with whole ones: then a
    # # copy of the target in fewer bits may pay as a drafter.
    # reads_fewer_bits: bool = False

    # # Why this device decodes slower than it could here, and what to install; commands say it.
    # slowed: str = ""

    # # True where the user's options ask for captured steps: then one that cannot be is an error.
    # capture_asked: bool = False

    # # Seconds that a request waits for captured steps it could do without: those of other
    # # lengths than plain decoding. Later requests capture the rest, one length at least each. A
    # # device that compiles for minutes sets it, so that its first image does not wait for all.
    # capture_patience: float = math.inf

    # # Memory that decoding adds beside tensors: a driver's libraries, or a host's (assumed
    # # here).
    # runtime_bytes: int = 600 * 10**6

    # # True for a device in software that stands for another: right results, and no speed to
    # # speak of.
    # simulated: bool = False

    # # Why this device cannot be used in this process any more, as a sentence; empty where it
    # # can.
    # unusable: str = ""

    # def support(self, capability: str) -> Support:
    #     """Answer for one of :data:`CAPABILITIES`; raises BackendError for any other name."""
    #     return super().support(capability)

    # def dtypes(self, requested: str = "auto") -> DTypePolicy:
    #     """Choose the dtypes for ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    #
    #     Raises BackendError for another name and for a dtype the device does not compute in.
    #     """
    #     return super().dtypes(requested)

    # def operators(self) -> frozenset[str] | None:
    #     """Name the operators (``aten::add.Tensor``) that the device has kernels for; None: all."""
    #     return super().operators()

    # def operator_rules(self) -> Mapping[str, OperatorRule]:
    #     """Say more about operators than their names: rules that every traced operator is held to.
    #
    #     Keys are checks of the kit: ``"operators"`` (is there a kernel?), ``"dtypes"`` (for these
    #     dtypes?), ``"indices"`` (are integers as wide as the device likes them?).
    #     """
    #     return super().operator_rules()

    # def checks(self) -> Mapping[str, Callable[[Any], Any]]:
    #     """Add conformance checks of the device's own, such as its kernels against the reference.
    #
    #     By name (``"group.name"``), functions as in :mod:`lantern_accel.testing`.
    #     """
    #     return super().checks()

    # def inference(self) -> AbstractContextManager[object]:
    #     """Return the mode in which models run without gradients; everything but training runs in it.
    #
    #     The reference is ``torch.inference_mode()``. A device that cannot make views of tensors
    #     from outside that mode returns ``torch.no_grad()``.
    #     """
    #     return super().inference()

    # def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
    #     """Make ``step``, a function of static buffers without a host read, ready to be replayed.
    #
    #     A backend may run ``step`` any number of times to warm up and record it: the caller resets
    #     the buffers that the step writes before the first replay. ``name`` says which function it
    #     is (``prefill`` or ``step``) in traces and errors. A device that replays functions of
    #     inputs and outputs asks :func:`~.capture.buffers_of` which buffers the step changes.
    #
    #     Raises :class:`~lantern_accel.errors.NotCapturableError` for a step that the device runs
    #     but cannot capture: it is then used as it is, with a warning that says what that costs.
    #     Any other error ends the request, or lets ``device="auto"`` go on to the next device.
    #     """
    #     return super().capture(step, name)

    # def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
    #     """Return a training function compiled for this device; gradients flow through it."""
    #     return super().compile(function)

    # def optimiser(self, groups: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    #     """Return AdamW over parameter groups, as this device runs it best.
    #
    #     ``settings`` are torch's (``lr``, ``betas``, ``weight_decay``). The reference asks torch
    #     for one fused kernel and takes the plain one where torch has none for the device.
    #     """
    #     return super().optimiser(groups, **settings)

    # def training_ops(self) -> TensorOps:
    #     """Return the operations of a model in training: gradients flow through them."""
    #     return super().training_ops()

    # def flush(self) -> None:
    #     """Run what the device has gathered; training calls it after gradients and after the update.
    #
    #     A lazy device marks a step here; any other does nothing.
    #     """
    #     return super().flush()

    # def stopwatch(self) -> Stopwatch:
    #     """Return a new stopwatch that measures this device's time: ``with ... as watch:``."""
    #     return super().stopwatch()

    # def explain(self, error: Exception) -> BackendError | None:
    #     """Turn an error that the device raised while decoding into one that says what to do.
    #
    #     None for an error that is not the device's.
    #     """
    #     return super().explain(error)

    # def memory(self) -> MemoryUse:
    #     """Read the memory in use, its peak since :meth:`reset_peak_memory`, and its limit."""
    #     return super().memory()

    # def reset_peak_memory(self) -> None:
    #     """Start a new peak, where the device allows it."""
    #     return super().reset_peak_memory()

    # def trim_memory(self) -> AbstractContextManager[None]:
    #     """Run the block, which makes large tensors that soon go again, in little more than they
    #     take.
    #     """
    #     return super().trim_memory()

    # def conditions(self) -> DeviceConditions:
    #     """Read clocks, power limit, temperature and the other processes on the device."""
    #     return super().conditions()

    # def counters(self) -> dict[str, int]:
    #     """Read the device's own counters, such as graph compilations and CPU fall-backs."""
    #     return super().counters()

    # def energy_mj(self) -> int | None:
    #     """Read the energy meter in millijoules since some fixed time; None without a meter."""
    #     return super().energy_mj()

    # def after_fork(self) -> None:
    #     """Get ready in a child of ``fork``, or set :attr:`unusable`; must not compute, and never
    #     raises.
    #
    #     A child has none of its parent's threads, and hardly a driver can be used in one.
    #     """
    #     return super().after_fork()

    # def close(self) -> None:
    #     """Give back what the backend holds; calling it twice is harmless."""
    #     return super().close()

    # # Whether attention reads visible slots alone: then nothing is gained by steps of fewer
    # # slots.
    # skips_hidden: bool = False

    # # Whether :meth:`trunk` leaves out rows that see nothing, as complete images of a batch then
    # # do.
    # skips_blind: bool = False

    # # Whether :meth:`linear_add` writes over its residual: a state that is kept is then copied.
    # sums_in_place: bool = False

    # def phase(self, name: str) -> AbstractContextManager[object]:
    #     """Mark a phase of the step (draft, verify, accept, commit) for the listener, if there is
    #     one.
    #
    #     A backend that marks phases for its own profiler leaves them to this method while
    #     ``self.listener`` is set.
    #     """
    #     return super().phase(name)

    # def host_copy(self, source: Tensor) -> HostCopy:
    #     """Return a way to read ``source``, a small static buffer, while steps run."""
    #     return super().host_copy(source)

    # def kv_layout(
    #     self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    # ) -> KVLayout:
    #     """Choose the layout of a cache with at least ``capacity`` slots a row.
    #
    #     The reference: a layer's keys, and its values, are one tensor ``[rows * capacity, heads,
    #     head_dim]``; with ``head_major`` one of ``[rows * heads * capacity, head_dim]``.
    #     """
    #     return super().kv_layout(layers, rows, capacity, heads, head_dim, dtype)

    # def allocate(self, layout: KVLayout) -> KVCache:
    #     """Allocate a zeroed cache that keeps its addresses."""
    #     return super().allocate(layout)

    # def pieces(self, layout: KVLayout, index: torch.dtype) -> Tensor:
    #     """Return where each row, or each head of each row, begins in a layer's tensor, integer."""
    #     return super().pieces(layout, index)

    # def address(self, kv: KVCache, slots: Tensor) -> Tensor:
    #     """Turn slots, int ``[R, T]``, into the form that :meth:`write` takes.
    #
    #     Computed once per pass and used by all layers. The reference gives flat indices into a
    #     layer's tensor, ``[R * T]`` or, by head, ``[R * T * H]``; int64, because index_copy_ takes
    #     no other.
    #     """
    #     return super().address(kv, slots)

    # def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
    #     """Store ``k, v [R, T, H, d]`` of one layer at ``address``, in place; no other slot changes."""
    #     return super().write(kv, layer, address, k, v)

    # def by_head(self, kv: KVCache, layer: int, count: int) -> tuple[Tensor, Tensor]:
    #     """Return keys and values of the first ``count`` slots as views, ``[R, H, count, d]`` each."""
    #     return super().by_head(kv, layer, count)

    # def read(self, kv: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    #     """Return keys and values of slots, int ``[R, T]``, as ``[R, T, H, d]`` each.
    #
    #     Nothing is computed, so that what was written can be compared bit for bit. Not for a step.
    #     """
    #     return super().read(kv, layer, slots)

    # def pack(self, weight: Tensor) -> Tensor:
    #     """Return a weight matrix ``[out, in]`` in the memory order that :meth:`linear` wants.
    #
    #     Called once a matrix when a model is loaded; what it returns replaces ``weight``. The
    #     reference wants it as it is.
    #     """
    #     return super().pack(weight)

    # def unpack(self, weight: Any) -> Tensor:
    #     """Return the matrix ``[out, in]`` that :meth:`pack` or :meth:`pack_rounded` was given.
    #
    #     It is the matrix as the device multiplies it, with whatever rounding packing brought.
    #     Needed by a device whose :meth:`pack` makes another one: a copy in fewer bits is made of
    #     it.
    #     """
    #     return super().unpack(weight)

    # def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    #     """Multiply ``x [..., in]`` by a packed weight: ``[..., out]``, ``x @ weight.T + bias``.
    #
    #     ``weight``: what :meth:`pack` or :meth:`pack_rounded` returned, of a matrix ``[out, in]``.
    #     The result has the dtype of ``x``; sums are made in float32.
    #     """
    #     return super().linear(x, weight, bias)

    # def linear_add(
    #     self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None
    # ) -> Tensor:
    #     """Return ``residual [..., out]`` plus the product of ``x [..., in]`` and a packed weight.
    #
    #     The residual is given up: a device may put the sum in its memory. The reference leaves it.
    #     """
    #     return super().linear_add(x, weight, residual, bias)

    # def pack_rounded(self, weight: Any, drafts: bool = False) -> Any:
    #     """Return a matrix in fewer bits in the order that its product wants (optional).
    #
    #     ``weight`` is a :class:`~lantern_accel.nn.rounding.Rounded` matrix on this device.
    #     ``drafts``: it is a copy's that drafts, so that its products may round activations too:
    #     the target checks what comes of them. What is returned is another one, for
    #     :meth:`linear_rounded`, or anything that :meth:`linear` takes. The reference wants it as
    #     it is.
    #     """
    #     return super().pack_rounded(weight, drafts)

    # def pack_fewer(self, weight: Any, how: Any, drafts: bool = False) -> Any:
    #     """Round a matrix and put it in the order of :meth:`pack_rounded` at once (optional).
    #
    #     ``weight``: a matrix ``[out, in]``, or what :meth:`pack` returned for one; ``how``: a
    #     :class:`~lantern_accel.nn.rounding.Rounding`; ``drafts``: of a copy that drafts, of whose
    #     groups no range is cut. It gives what :func:`~lantern_accel.nn.rounding.rounded` and
    #     :meth:`pack_rounded` would; None where the device has nothing faster than these two. A
    #     format with floating-point codes is the device's own: None where it multiplies none, which
    #     refuses it.
    #     """
    #     return super().pack_fewer(weight, how, drafts)

    # def rounded_bits(self, how: Any) -> float:
    #     """Return the bits that a weight takes as :meth:`pack_rounded` keeps it (optional).
    #
    #     ``how`` is a :class:`~lantern_accel.nn.rounding.Rounding`. Codes, steps and offsets by
    #     group; for the memory plan of a copy that drafts. The reference keeps the format's own.
    #     """
    #     return super().rounded_bits(how)

    # def linear_rounded(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    #     """Multiply ``x [..., in]`` by a matrix in fewer bits: ``[..., out]`` (recommended).
    #
    #     The reference makes the whole matrix in the dtype of ``x`` first, which saves memory but
    #     no time.
    #     """
    #     return super().linear_rounded(x, weight, bias)

    # def logits(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    #     """Multiply ``x [..., in]`` by a head's packed weight: float32 ``[..., out]`` (optional).
    #
    #     ``weight``: as :meth:`linear` takes it. The reference rounds the sums to the dtype of
    #     ``x`` first. A device that has them in float32 should leave them so: of what bfloat16
    #     costs, most is lost here.
    #     """
    #     return super().logits(x, weight, bias)

    # def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
    #     """Turn a boolean mask (True = visible) into the form that :meth:`attend` takes.
    #
    #     The reference is additive: 0 where visible, the smallest finite number elsewhere. Every
    #     element by itself: parts of a mask, each in this form, may be joined.
    #     """
    #     return super().mask(visible, dtype)

    # def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
    #     """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``.
    #
    #     ``q`` is rotated already, and so are the keys of the cache. ``mask``: what :meth:`mask`
    #     made, in the dtype of ``q``, the same for all heads; by the reference it is added to the
    #     scores, 0 where slot l is visible to position t. Scores are scaled by ``d ** -0.5``.
    #     Returns ``[R, T, H, d]`` in the dtype of ``q``. Slots that are not visible may hold
    #     anything finite.
    #     """
    #     return super().attend(q, kv, layer, mask)

    # def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    #     """Softmax attention, scale ``d ** -0.5``; ``k, v [R, L, H, d]``; ``mask=None`` is causal.
    #
    #     ``q [R, T, H, d]``; ``mask`` as in :meth:`attend`; returns ``[R, T, H, d]`` in the dtype
    #     of ``q``.
    #     """
    #     return super().attend_dense(q, k, v, mask)

    # def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    #     """Normalise ``x [..., D]`` in float32, return to its dtype, then scale by ``weight [D]``.
    #
    #     ``x / sqrt(mean(x ** 2) + eps) * weight``, rounded in LlamaGen's order.
    #     """
    #     return super().rms_norm(x, weight, eps)

    # def rotary(self, cos: Tensor, sin: Tensor) -> Any:
    #     """Turn rotary rows into the form that :meth:`rotate` takes; made once a pass.
    #
    #     ``cos, sin`` float32, broadcasting against ``[R, T, ..., d/2]``.
    #     """
    #     return super().rotary(cos, sin)

    # def rotate(self, x: Tensor, rotary: Any) -> Tensor:
    #     """Rotate adjacent pairs ``(x0, x1), (x2, x3), ...`` of ``x [R, T, ..., d]`` in float32.
    #
    #     ``rotary``: what :meth:`rotary` makes, or the pair that it makes it of.
    #     """
    #     return super().rotate(x, rotary)

    # def turned(self, x: Tensor, rotary: Any) -> Tensor:
    #     """Return what :meth:`rotate` does in float32, whatever the dtype of ``x``."""
    #     return super().turned(x, rotary)

    # def rotate_write(
    #     self, qkv: Tensor, rotary: Any, kv: KVCache, layer: int, address: Tensor
    # ) -> Tensor:
    #     """Rotate q and k of ``qkv [R, T, 3, H, d]``, :meth:`write` k and v of a layer; return q."""
    #     return super().rotate_write(qkv, rotary, kv, layer, address)

    # def trunk(
    #     self,
    #     blocks: nn.ModuleList,
    #     x: Tensor,
    #     at: Pass,
    #     taps: Sequence[int] = (),
    #     norm: nn.Module | None = None,
    # ) -> Tensor:
    #     """Run a stack of decoder blocks on ``x [R, T, D]``, then ``norm`` where there is one.
    #
    #     ``blocks`` and ``norm`` are modules of :mod:`lantern_accel.nn.transformer` or of their
    #     shape, Returns ``[R, T, (taps + 1) D]``: the states after the blocks ``taps``, counted
    #     from 1 and ascending, then the last ones. ``x`` is given up (see :meth:`linear_add`). The
    #     reference runs one block after another; the rotary form is made once for all.
    #     """
    #     return super().trunk(blocks, x, at, taps, norm)

    # def fused_step(self, plan: StepPlan) -> FusedStep | None:
    #     """Return a function that does a plan's step, or what follows its pass, in the device's
    #     calls.
    #
    #     Called when an engine is made, for its whole step first; where that is refused, and drafts
    #     need no drafter, for the plan without a target. None where the device has no kernel for
    #     the plan, or knows another :data:`~.plan.PLAN_VERSION`, as here: then the step runs
    #     operator by operator.
    #     """
    #     return super().fused_step(plan)

    # def fused_guesses(self, plan: StepPlan) -> FusedStep | None:
    #     """Return a function that guesses a window's drafts which no pass has seen; None: operators
    #     do.
    #
    #     For plans whose window has a draft head; what a step guesses itself is
    #     :meth:`fused_step`'s.
    #     """
    #     return super().fused_guesses(plan)

    # def swiglu(self, x: Tensor) -> Tensor:
    #     """``silu(gate) * up [..., F]`` of ``x = [gate; up] [..., 2F]``, in the dtype of ``x``."""
    #     return super().swiglu(x)

    # # Dtype of token ids, positions and cache slots in a step; int32 where the device prefers
    # # it.
    # index: torch.dtype = torch.int64

    # # Bytes that an engine may hold of noise, made once per image where all of it fits in them.
    # #
    # # A step then looks up a row for each token in place of computing it: a device on which what
    # # is launched costs more than what is read sets it. The bits are :meth:`noise`'s either way.
    # noise_bytes: int = 0

    # # Whether one :meth:`filter` of all rows of a tree takes less time than two of those that
    # # count.
    # #
    # # Leaves that are not visited are then filtered, too; what comes of it is the same.
    # filters_trees: bool = False

    # def held(self, buffer: Tensor) -> Tensor:
    #     """Return what a static buffer holds now, for a step that reads it late and writes it early.
    #
    #     The reference returns the buffer, since operators run in the order in which they are
    #     written. A device whose compiler puts them in another order returns a copy, which that has
    #     to make first.
    #     """
    #     return super().held(buffer)

    # def put(self, buffer: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
    #     """Write ``values`` to entries ``index [n]`` of a buffer, dimensions ``dim, dim + 1`` as one.
    #
    #     ``values`` has n entries in the place of the two. The reference writes them in place,
    #     through a view; a device whose recordings take no write to a view writes the whole buffer.
    #     """
    #     return super().put(buffer, dim, index, values)

    # def scan(self, weights: Tensor) -> Tensor:
    #     """Return the running sums of ``weights [..., V]``, none of them below the one before it.
    #
    #     The same bits every time, for the same weights: draws by inverse CDF depend on it. The
    #     reference is :func:`two_level_scan`.
    #     """
    #     return super().scan(weights)

    # def running_sums(self, size: int, device: torch.device) -> Tensor | None:
    #     """Return what draws from ``size`` weights take as ``sums``, made once for an engine.
    #
    #     The reference is the :func:`triangle` of its scan. None where a device scans or draws in a
    #     way of its own: then its draws are called without.
    #     """
    #     return super().running_sums(size, device)

    # def guide(
    #     self,
    #     logits: Tensor,
    #     token: Tensor,
    #     scale: Tensor | None,
    #     image_scale: Tensor | float | None = None,
    #     penalties: tuple[Tensor, Tensor] | None = None,
    # ) -> Tensor:
    #     """Return guided logits ``[B, T, V]`` from float32 rows ``[R, T, V]``, branch by branch.
    #
    #     ``token`` integer ``[B, T]``, or ``[B]`` where all T are of one: the image tokens that the
    #     logits are of. ``scale`` float32 ``[N]``: the guidance of each token (:func:`guide`); None
    #     without. ``penalties``: integer ``[N]`` and float32 ``[K, V]``: which row is added to each
    #     token's logits.
    #     """
    #     return super().guide(logits, token, scale, image_scale, penalties)

    # def filter_tables(self, device: torch.device) -> Any:
    #     """Return what :meth:`filter` takes as ``tables``, made once for an engine.
    #
    #     None where it takes nothing, as the reference: then it is called without.
    #     """
    #     return super().filter_tables(device)

    # def filter(self, logits: Tensor, given: Filter, tables: Any = None) -> Tensor:
    #     """Return the probabilities ``[..., V]`` that a filter makes of logits ``[..., V]``, all
    #     float32.
    #
    #     Logits over the temperature; then top-k, which keeps values equal to the k-th, and top-p,
    #     which keeps a code while the codes before it hold p or less, in the order that
    #     ``given.p_first`` says; then a softmax. 0 and None leave a filter out. ``tables``: what
    #     :meth:`filter_tables` made.
    #     """
    #     return super().filter(logits, given, tables)

    # def draw(self, weights: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
    #     """Draw by inverse CDF: codes ``[...]`` from weights ``[..., V]`` (any sum), uniforms
    #     ``[...]``.
    #
    #     The uniforms are below ``1 - 2**-22`` (:mod:`lantern_accel.device.noise`), so that
    #     rounding cannot push a draw past the last code with a weight. ``sums``: what
    #     :meth:`running_sums` made.
    #     """
    #     return super().draw(weights, uniform, sums)

    # def draw_without_replacement(
    #     self, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None
    # ) -> Tensor:
    #     """Draw ``K`` different codes ``[..., K]``, from weights ``[..., V]``, uniforms ``[..., K]``.
    #
    #     Where fewer than K codes have a weight, the rest of the draws repeat code V - 1 with no
    #     weight; acceptance skips drafts whose probability is 0. ``sums`` as in :meth:`draw`.
    #     """
    #     return super().draw_without_replacement(weights, uniforms, sums)

    # def race(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    #     """Draw codes ``[B, T]`` from weights ``[B, T, V]`` of any sum, by position-keyed noise.
    #
    #     The code with the largest ``weight / noise``, the lower of two that are equal
    #     (:mod:`lantern_accel.device.noise`): the same for the same row, key and position, whatever
    #     else is computed with it. ``keys`` int32 ``[B, 3]``; ``positions`` integer ``[B, T]``, of
    #     the tokens.
    #     """
    #     return super().race(weights, keys, positions)

    # def race_siblings(self, weights: Tensor, keys: Tensor, positions: Tensor, count: int) -> Tensor:
    #     """Draw ``count`` different codes ``[B, T, count]``: the race's first, second, ...
    #
    #     The first is :meth:`race`'s. Codes without weight come last, and acceptance never keeps
    #     them.
    #     """
    #     return super().race_siblings(weights, keys, positions, count)

    # def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    #     """Return weights over the noise of their place, ``[B, T, V]``, which :meth:`race` compares.
    #
    #     Arguments as in :meth:`race`.
    #     """
    #     return super().perturb(weights, keys, positions)

    # def noise(self, keys: Tensor, positions: Tensor, codes: int) -> Tensor:
    #     """Return the noise of all codes at positions, float32 ``[B, T, codes]``.
    #
    #     The same bits on every device (:func:`lantern_accel.device.noise.exponential`); ``keys``
    #     and ``positions`` as in :meth:`race`.
    #     """
    #     return super().noise(keys, positions, codes)

    # def likeliest(
    #     self, weights: Tensor, count: int, luck: Tensor | None = None
    # ) -> tuple[Tensor, Tensor]:
    #     """Return what the ``count`` likeliest codes promise, and the codes: ``[B, T, count]`` each.
    #
    #     ``weights [B, T, V]`` sum to 1. ``luck [B, 1, V]``: what they are multiplied by first, one
    #     over the noise of a position. Promises are logarithms of shares, float32, :data:`FLOOR` at
    #     least, the largest first. Which of equal codes come first is the device's choice.
    #     """
    #     return super().likeliest(weights, count, luck)

    # def best(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    #     """Return the ``count`` largest of ``values [..., n]``, the largest first, and their places.
    #
    #     Which of equal ones come first is the device's choice.
    #     """
    #     return super().best(values, count)

    # def accept(
    #     self,
    #     tree: DraftedTree,
    #     logits: Tensor,
    #     given: Filter,
    #     rule: AcceptanceRule,
    #     uniforms: Tensor,
    #     bonus_uniform: Tensor,
    #     masked: bool,
    # ) -> tuple[Tensor, ...] | None:
    #     """Filter the rows of a tree that are visited, walk down it and draw the token after it.
    #
    #     Takes and returns what :func:`lantern_accel.decoding.accept.accept` does, the fields of an
    #     ``Accepted``; None where the device has no kernel for this tree or rule, as here: then the
    #     tensor code of that module runs. ``masked``: logits of -inf are codes that may not be.
    #     """
    #     return super().accept(tree, logits, given, rule, uniforms, bonus_uniform, masked)

    # def accept_invariant(
    #     self, tree: DraftedTree, logits: Tensor, given: Filter, keys: Tensor, length: Tensor
    # ) -> tuple[Tensor, ...] | None:
    #     """Filter the rows of a tree that are visited, and walk down the tokens that win there.
    #
    #     Takes what :func:`lantern_accel.decoding.invariant.accept_invariant` does, and returns the
    #     fields of an ``Accepted``; None where the device has no kernel for this tree, as here:
    #     then the tensor code of that module runs.
    #     """
    #     return super().accept_invariant(tree, logits, given, keys, length)

    # def couple(
    #     self, x: Tensor, p: Tensor, q: Tensor, tests: Tensor, draws: Tensor
    # ) -> tuple[Tensor, Tensor] | None:
    #     """Test a window's drafts, replace the first that fails, draw those behind it again (SJD).
    #
    #     Takes what :func:`lantern_accel.decoding.maximal_coupling.couple` does; returns its tokens
    #     ``[B, L]`` and counts ``[B]``. None where the device has no kernel for it, as here: then
    #     the tensor code of that module runs.
    #     """
    #     return super().couple(x, p, q, tests, draws)
