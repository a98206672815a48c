"""A gated activation and the projection behind it, of which backward needs gate and up alone.

    forward    p = act(gate) * up      y = p W^T + b + t B^T                         t = s p A^T
    backward   g = s dy B              dp = dy W + g A
               one kernel:             dgate, dup and, if it is needed, p once more
               dA = g^T p              dB = dy^T t          dW = dy^T p              db = sum of dy

Two nodes make it. The first has gate and up saved; the second is given the first and saves nothing but t, so that a
checkpoint which runs the layer again has all it wants when p is made, and stops before the product with W. In backward
the second node does the work of both, since it is the one that needs p. It sends dgate and dup along on the gradient of
p, which is a tensor without numbers of its own then: the memory of dp has become p. Nothing is left on a node, so that
backwards of one graph may overlap.

Where saved tensors go to hooks (checkpointing, offloading) t is not kept but made again from p, which is there.
Weights, and A and B in the dtype computed in, are kept on the node itself (see `fastft.ops.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..adapter_casts import AdapterCasts, cast
from ..first_order import first_order
from ..kept import KeptTensors
from ..packed_weight import PackedWeight, unpacked
from ..products import add_low_rank, as_rows, in_shape, mm_to, scaled_mms, to_dtype

# The inputs of _Projected before the trained parameters.
_LEADING = 3
# The attribute of a gradient of p that has the gradients of gate and up with it.
_HALVES = "_fastft_halves"


class Kernels(NamedTuple):
    """Who computes the activation: see `triton.gated_forward` and `triton.gated_backward`."""

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


class Projection(NamedTuple):
    """A linear layer, with a LoRA update or without: y = x W^T + b + scaling (x A^T) B^T."""

    weight: torch.Tensor | PackedWeight  # [N, I]; a packed one is made once in forward and once in backward
    bias: torch.Tensor | None = None  # [N]
    lora_A: torch.Tensor | None = None  # [r, I]
    lora_B: torch.Tensor | None = None  # [N, r]
    scaling: float = 1.0

    def tensors(self) -> tuple[torch.Tensor | PackedWeight | None, ...]:
        return self[:4]


class _Call(NamedTuple):
    """A call apart from the product. Only trained parameters are inputs of the Function as well."""

    layer: Projection
    dtype: torch.dtype  # to compute in
    casts: AdapterCasts | None
    trained: list[int]  # places in layer.tensors()

    def needs(self, needs_input_grad: Sequence[bool]) -> list[bool]:
        """Whether weight, bias, A and B need their gradients."""
        needs = [False] * 4
        for place, need in zip(self.trained, needs_input_grad[_LEADING:], strict=True):
            needs[place] = need
        return needs


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str, kernels: Kernels) -> torch.Tensor:
    """act(gate) * up; see `fastft.ops.gated_mlp.gated`, nothing checked, not empty."""
    return _Gated.apply(gate, up, activation, kernels)


def gated_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    layer: Projection,
    dtype: torch.dtype,
    kernels: Kernels,
    casts: AdapterCasts | None = None,
) -> torch.Tensor:
    """See `fastft.ops.gated_mlp.gated_linear`; dtype is the one to compute in, nothing checked, not empty."""
    product = _Gated.apply(gate, up, activation, kernels)
    tensors = layer.tensors()
    trained = [i for i, each in enumerate(tensors) if isinstance(each, torch.Tensor) and each.requires_grad]
    call, node = _Call(layer, dtype, casts, trained), product.grad_fn
    if node is not None:
        node.is_projected = True
    return _Projected.apply(product, node, call, *[tensors[place] for place in trained])


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str, kernels: Kernels) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.kernels, ctx.is_projected = activation, kernels, False
        product = kernels.forward(_rows(gate), _rows(up), activation)
        return in_shape(product, gate.shape[:-1])

    @staticmethod
    @first_order("gated_mlp")
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        halves = getattr(grad, _HALVES, None)
        if halves is None and ctx.is_projected and not any(grad.stride()):
            raise RuntimeError(
                "something between two nodes of fastft's MLP copied the gradient that the second sends to the first; "
                "patch the model with gated_mlp=False"
            )
        if halves is None:
            halves = _open(ctx, grad, with_product=False, owned=False)[0]
        dgate, dup = (part.view(grad.shape) for part in halves)
        return dgate, dup, None, None


def _open(
    node: Any, grad: torch.Tensor, *, with_product: bool, owned: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """The gradients of a node's gate and up [T, I], and its product. A checkpoint allows it once a backward."""
    gate, up = node.saved_tensors
    dgate, dup, product = node.kernels.backward(
        _rows(grad), _rows(gate), _rows(up), node.activation, with_product=with_product, owned=owned
    )
    return (dgate, dup), product


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


class _Projected(torch.autograd.Function):
    """The projection of a product that node, of a `_Gated`, makes; None where neither half needs gradients."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, node: Any, call: _Call, *trained: torch.Tensor) -> torch.Tensor:
        weight, bias, lora_A, lora_B, scaling = call.layer
        dtype, rows = call.dtype, as_rows(product, call.dtype)
        needs_weight, _, needs_A, needs_B = call.needs(ctx.needs_input_grad)
        y = F.linear(rows, unpacked(weight, dtype), bias if bias is None else to_dtype(bias, dtype))
        t, adapters = None, None
        if lora_A is not None and lora_B is not None:
            A, (B,) = (
                cast((lora_A,), (lora_B,), dtype) if call.casts is None else call.casts.get((lora_A,), (lora_B,), dtype)
            )
            in_place = not torch._C._len_torch_dispatch_stack()
            t = scaled_mms([(rows, A.t(), scaling)], in_place)
            y = add_low_rank(y, t, B.t(), in_place)
            adapters = (A, B)

        keeps_t = needs_B and (node is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is None)
        keeps_product = node is None and (needs_A or needs_weight)
        ctx.save_for_backward(product if keeps_product else None, t if keeps_t else None)
        ctx.makes_t = needs_B and not keeps_t
        ctx.adapters = KeptTensors(adapters) if adapters is not None else None
        ctx.weights = KeptTensors((weight if isinstance(weight, torch.Tensor) else None,))
        ctx.set_materialize_grads(False)
        ctx.node, ctx.call, ctx.shape, ctx.product_dtype = node, call, product.shape, product.dtype
        return in_shape(y, product.shape[:-1])

    @staticmethod
    @first_order("gated_mlp")
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return (None,) * (_LEADING + len(ctx.call.trained))
        # Autocast around backward would lower GEMMs that forward ran in a wider dtype.
        kind = dy.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _gradients(ctx, dy)
        return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of the product, if it needs one, and of what is trained."""
    product, t = ctx.saved_tensors
    call, node, needs_product = ctx.call, ctx.node, ctx.needs_input_grad[0]
    layer, dtype = call.layer, call.dtype
    needs_weight, needs_bias, needs_A, needs_B = call.needs(ctx.needs_input_grad)
    dy = as_rows(dy, dtype)
    in_place = not torch._C._len_torch_dispatch_stack()
    if ctx.adapters is not None and (needs_product or needs_A or ctx.makes_t):
        A, B = ctx.adapters.unchanged()
        g = scaled_mms([(dy, B, layer.scaling)], in_place)
    dproduct = sent = None
    if needs_product:
        ctx.weights.unchanged()
        dproduct = torch.mm(dy, unpacked(layer.weight, dtype))
        if ctx.adapters is not None:
            dproduct = add_low_rank(dproduct, g, A, in_place)
        dproduct = to_dtype(dproduct, ctx.product_dtype)
        sent = dproduct.view(ctx.shape)
        if needs_A or needs_weight or ctx.makes_t:
            halves, product = _open(node, dproduct, with_product=True, owned=True)
            sent = halves[0].as_strided(ctx.shape, (0,) * len(ctx.shape))
            setattr(sent, _HALVES, halves)

    gradients: list[torch.Tensor | None] = [None] * 4
    if needs_weight or needs_A or ctx.makes_t:
        rows = as_rows(product, dtype)
    if needs_weight:
        gradients[0] = mm_to(dy.t(), rows, layer.weight.dtype)
    if needs_bias:
        gradients[1] = dy.sum(0, dtype=layer.bias.dtype)
    if needs_A:
        gradients[2] = mm_to(g.t(), rows, layer.lora_A.dtype)
    if needs_B:
        t = scaled_mms([(rows, A.t(), layer.scaling)], in_place) if ctx.makes_t else t
        gradients[3] = mm_to(dy.t(), t, layer.lora_B.dtype)
    return sent, None, None, *[gradients[place] for place in call.trained]
