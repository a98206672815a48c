"""The experts of a sparse layer as one autograd node, which keeps its input, the pre-activation and the routing.

    x = gather(hidden)    h = x W1    a = gate(h + b1)    y = a W2    out[t] = sum over k of w[t, k] (y + b2)

    forward saves     hidden [T, H], h [S, 2I], w and the order of S = T * K rows
    backward          g = gather(dout)                       [S, H]
                      da = g W2^T                            [S, I], before the weight of the pair
                      dh = w * da * gate'(h), dw = <da, a>   no y is needed, and nothing is divided by w
                      dhidden = combine(dh W1^T)
    trained weights   dW2 = outer(w * a, g), dW1 = outer(gather(hidden), dh), and sums of rows for biases

Adapters add s * (x A1) B1 to h and s * (a A2) B2 to y. W + s A B is never made, nor a gradient of its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..first_order import first_order
from ..kept import KeptTensors
from ..packed_weight import PackedWeight
from .gate import Gate
from .order import ExpertOrder
from .products import Products


class ExpertWeights(NamedTuple):
    """Of all experts, from input to output whatever the layout in memory: transposed views where it is the other.

    Attributes:
        gate_up: [E, H, 2 * I].
        down: [E, I, H].
        gate_up_bias: [E, 2 * I] or None.
        down_bias: [E, H] or None.
    """

    gate_up: torch.Tensor | PackedWeight
    down: torch.Tensor | PackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class ExpertAdapter(NamedTuple):
    """scaling * A B, added to one weight of each expert: A [E, in, r], B [E, r, out]."""

    A: torch.Tensor
    B: torch.Tensor
    scaling: float


class Pieces(NamedTuple):
    """What is between the products, in plain torch (`reference`) or as kernels."""

    gather_rows: Callable[..., torch.Tensor]
    combine_rows: Callable[..., torch.Tensor]
    gate_forward: Callable[..., torch.Tensor]
    gate_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What was decided for one call.

    Attributes:
        gate: between the products.
        pieces: what is between the products.
        products: of rows with weights.
        thin: products with an adapter's factors.
        scaling: of the two adapters.
        packed: gate_up and down where they have to be made.
    """

    gate: Gate
    pieces: Pieces
    products: Products
    thin: Products
    scaling: tuple[float, float]
    packed: tuple[PackedWeight | None, PackedWeight | None]

    def weight(self, which: int, plain: torch.Tensor | None) -> torch.Tensor:
        """gate_up (0) or down (1)."""
        packed = self.packed[which]
        if packed is not None:
            return packed.make()
        assert plain is not None
        return plain

    def for_offsets(self, offsets: torch.Tensor) -> Setup:
        """The same for another order: a checkpoint routes anew, and what it recomputes lies in the new order."""
        if offsets.data_ptr() == self.products.offsets.data_ptr():
            return self
        products = type(self.products)(offsets)
        thin = products if self.thin is self.products else type(self.thin)(offsets)
        return replace(self, products=products, thin=thin)

    def add_adapter(self, which: int, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """out + scaling * rows weight, in the memory of out unless a dispatch mode may have kept that."""
        if torch._C._len_torch_dispatch_stack():
            out = out.clone()  # a selective checkpoint hands the product out again, and would find the update in it
        self.thin.add_matmul_(out, rows, weight, self.scaling[which])
        return out


@dataclass(slots=True)
class Run:
    """One call, and what goes from its first half to its second.

    Attributes:
        order: of the rows.
        topk_indices: [T, K].
        setup: what was decided.
        pending: what the second half computes from; gone when it has run.
    """

    order: ExpertOrder
    topk_indices: torch.Tensor
    setup: Setup
    pending: tuple[Any, ...] = ()


def run_experts(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    adapters: tuple[ExpertAdapter | None, ExpertAdapter | None],
    run: Run,
) -> torch.Tensor:
    """out [T, H] of hidden [T, H], whose dtype is that of the weights."""
    factors = [factor for adapter in adapters for factor in ((None, None) if adapter is None else adapter[:2])]
    plain = [None if isinstance(weight, PackedWeight) else weight for weight in weights]
    begun = _FirstHalf.apply(hidden, topk_weights, *plain, *factors, run)
    return _SecondHalf.apply(begun, run)


class _FirstHalf(torch.autograd.Function):
    """Everything that is saved. It stands for the output until the other half makes it.

    A checkpoint runs a layer's forward again only until all that was saved is there, so that in two halves it runs
    neither the gate, nor the second product, nor the combination again. The order of the rows is saved like the
    product that lies in it: where a second forward routes a token otherwise, the two still belong together.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        hidden, topk_weights, gate_up, down, gate_up_bias, down_bias, A1, B1, A2, B2, run = inputs
        setup: Setup = run.setup
        x = setup.pieces.gather_rows(hidden, run.order, run.topk_indices.shape[1])
        pre = setup.products.matmul(x, setup.weight(0, gate_up))
        low = None
        if A1 is not None:
            low = setup.thin.matmul(x, A1)
            pre = setup.add_adapter(0, pre, low, B1)
        ctx.save_for_backward(hidden, topk_weights, pre, low, A1, B1, A2, B2, run.topk_indices, *run.order)
        ctx.kept = KeptTensors((gate_up, down, gate_up_bias, down_bias))
        ctx.setup = setup
        run.pending = (pre, topk_weights, down, gate_up_bias, down_bias, A2, B2)
        return hidden.new_zeros(()).expand(hidden.shape)

    @staticmethod
    @first_order("experts")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # What autocast would cast here, it has not cast in forward.
        with torch.autocast(grads[0].device.type, enabled=False):
            return _Backward(ctx, grads[0]).run()


class _SecondHalf(torch.autograd.Function):
    """The output, from what the first half left. It saves nothing: its gradient is the first half's."""

    @staticmethod
    def forward(ctx: Any, begun: torch.Tensor, run: Run) -> torch.Tensor:
        pre, topk_weights, down, gate_up_bias, down_bias, A2, B2 = run.pending
        run.pending = ()
        setup = run.setup
        activation = setup.pieces.gate_forward(pre, run.order, setup.gate, gate_up_bias)
        del pre
        rows = setup.products.matmul(activation, setup.weight(1, down))
        if A2 is not None:
            rows = setup.add_adapter(1, rows, setup.thin.matmul(activation, A2), B2)
        return setup.pieces.combine_rows(rows, run.order, topk_weights, run.topk_indices, down_bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grads[0], None


class _Trained(NamedTuple):
    """Which of the weights need a gradient."""

    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class _Backward:
    """One backward pass; its steps share what they have made."""

    def __init__(self, ctx: Any, grad: torch.Tensor) -> None:
        saved = ctx.saved_tensors
        self.hidden, self.topk_weights, self.pre, self.low = saved[:4]
        self.A1, self.B1, self.A2, self.B2, self.topk_indices = saved[4:9]
        self.order = ExpertOrder(*saved[9:])
        self.gate_up, self.down, self.gate_up_bias, self.down_bias = ctx.kept.unchanged()
        self.setup: Setup = ctx.setup.for_offsets(self.order.offsets)
        self.grad = grad
        needed = ctx.needs_input_grad
        self.needs_hidden, self.needs_weights = needed[0], needed[1]
        self.trains = _Trained(*needed[2:6])
        self.trains_adapters = (any(needed[6:8]), any(needed[8:10]))

    def run(self) -> tuple[torch.Tensor | None, ...]:
        setup, choices = self.setup, self.topk_indices.shape[1]
        g = setup.pieces.gather_rows(self.grad, self.order, choices)
        activation_grad = setup.products.matmul(g, setup.weight(1, self.down).mT)
        low_grad = None
        if self.A2 is not None:
            low_grad = setup.thin.matmul(g, self.B2.mT)
            activation_grad = setup.add_adapter(1, activation_grad, low_grad, self.A2.mT)
        pre_grad, weights_grad, weighted = setup.pieces.gate_backward(
            self.pre, activation_grad, self.order, self.topk_weights, setup.gate, self.gate_up_bias,
            with_activation=self.trains.down or self.trains_adapters[1],
        )  # fmt: skip
        del activation_grad
        down_grad = _outer_like(setup.products, self.down, weighted, g) if self.trains.down else None
        A2_grad, B2_grad = self._second_adapter(weighted, g, low_grad)
        gate_up_bias_grad = None
        if self.trains.gate_up_bias:
            gate_up_bias_grad = setup.products.sums(pre_grad.new_ones(len(pre_grad)), pre_grad)
        down_bias_grad = setup.products.sums(self._weights_of_rows(), g) if self.trains.down_bias else None
        del g, weighted
        x = None
        if self.trains.gate_up or self.trains_adapters[0]:
            x = setup.pieces.gather_rows(self.hidden, self.order, choices)
        gate_up_grad = _outer_like(setup.products, self.gate_up, x, pre_grad) if self.trains.gate_up else None
        low_grad = None if self.A1 is None else setup.thin.matmul(pre_grad, self.B1.mT)
        A1_grad, B1_grad = self._first_adapter(x, pre_grad, low_grad)
        del x
        return (
            self._hidden(pre_grad, low_grad), self._topk_weights(weights_grad), gate_up_grad, down_grad,
            gate_up_bias_grad, down_bias_grad, A1_grad, B1_grad, A2_grad, B2_grad, None,
        )  # fmt: skip

    def _hidden(self, pre_grad: torch.Tensor, low_grad: torch.Tensor | None) -> torch.Tensor | None:
        if not self.needs_hidden:
            return None
        setup = self.setup
        rows = setup.products.matmul(pre_grad, setup.weight(0, self.gate_up).mT)
        if low_grad is not None:
            rows = setup.add_adapter(0, rows, low_grad, self.A1.mT)
        return setup.pieces.combine_rows(rows, self.order, None, self.topk_indices, None)

    def _topk_weights(self, grad: torch.Tensor) -> torch.Tensor | None:
        """<dout, y>: with the second bias, y is more than what the activation makes of it."""
        if not self.needs_weights:
            return None
        if self.down_bias is not None:
            by_expert = self.grad.to(grad.dtype) @ self.down_bias.to(grad.dtype).t()
            indices = self.topk_indices.long()
            owned = (indices >= 0) & (indices < len(self.order.offsets))
            grad = grad + by_expert.gather(1, indices.where(owned, 0)).where(owned, 0)
        return grad.to(self.topk_weights.dtype)

    def _weights_of_rows(self) -> torch.Tensor:
        return self.topk_weights.reshape(-1)[self.order.pairs.long()]

    def _first_adapter(self, x: Any, pre_grad: torch.Tensor, low_grad: Any) -> tuple[Any, Any]:
        if not self.trains_adapters[0]:
            return None, None
        thin, scaling = self.setup.thin, self.setup.scaling[0]
        return thin.outer(x, low_grad).mul_(scaling), thin.outer(self.low, pre_grad).mul_(scaling)

    def _second_adapter(self, weighted: Any, g: torch.Tensor, low_grad: Any) -> tuple[Any, Any]:
        """With w in the activation, dB = (w a A)^T g and dA = (w a)^T (g B^T)."""
        if not self.trains_adapters[1]:
            return None, None
        thin, scaling = self.setup.thin, self.setup.scaling[1]
        low = thin.matmul(weighted, self.A2)
        return thin.outer(weighted, low_grad).mul_(scaling), thin.outer(low, g).mul_(scaling)


def _outer_like(products: Products, weight: torch.Tensor, left: Any, right: Any) -> torch.Tensor:
    """outer(left, right) in the weight's own layout, so that adding it to `.grad` copies nothing."""
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return products.outer(right, left).mT
    return products.outer(left, right)
