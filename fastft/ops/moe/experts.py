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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..first_order import first_order
from ..kept import KeptTensors
from .gate import Gate
from .order import ExpertOrder
from .products import Products


class PackedWeight(NamedTuple):
    """A frozen weight that is made when it is needed, and once more for backward: one of 4 bits.

    Attributes:
        make: the weight, in memory that the next one may be made in.
        shape, dtype: of what it makes.
        device: where.
    """

    make: Callable[[], torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


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


@dataclass(slots=True)
class Run:
    """One call's decisions, and what goes from its first half to its second.

    Attributes:
        order: of the rows.
        topk_indices: [T, K].
        gate: between the products.
        pieces: what is between the products.
        products: of rows with weights.
        thin: products with an adapter's factors.
        scaling: of the two adapters.
        packed: gate_up and down where they have to be made.
        pending: what the second half computes from; gone when it has run.
    """

    order: ExpertOrder
    topk_indices: torch.Tensor
    gate: Gate
    pieces: Pieces
    products: Products
    thin: Products
    scaling: tuple[float, float]
    packed: tuple[PackedWeight | None, PackedWeight | None]
    pending: tuple[Any, ...] = ()

    def gate_up(self, weight: torch.Tensor | None) -> torch.Tensor:
        return self._made(weight, self.packed[0])

    def down(self, weight: torch.Tensor | None) -> torch.Tensor:
        return self._made(weight, self.packed[1])

    @staticmethod
    def _made(weight: torch.Tensor | None, packed: PackedWeight | None) -> torch.Tensor:
        if weight is not None:
            return weight
        assert packed is not None
        return packed.make()


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
    neither the gate, nor the second product, nor the combination again.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        hidden, topk_weights, gate_up, down, gate_up_bias, down_bias, A1, B1, A2, B2, run = inputs
        x = run.pieces.gather_rows(hidden, run.order, run.topk_indices.shape[1])
        pre = run.products.matmul(x, run.gate_up(gate_up))
        low = None
        if A1 is not None:
            low = run.thin.matmul(x, A1)
            run.thin.add_matmul_(pre, low, B1, run.scaling[0])
        ctx.save_for_backward(hidden, topk_weights, pre, low)
        ctx.kept = KeptTensors((gate_up, down, gate_up_bias, down_bias, A1, B1, A2, B2))
        ctx.run = run
        run.pending = (pre, topk_weights, down, gate_up_bias, down_bias, A2, B2)
        return hidden.new_zeros(()).expand(hidden.shape)

    @staticmethod
    @first_order("experts")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        return _Backward(ctx, grads[0]).run()


class _SecondHalf(torch.autograd.Function):
    """The output, from what the first half left. It saves nothing: its gradient is the first half's."""

    @staticmethod
    def forward(ctx: Any, begun: torch.Tensor, run: Run) -> torch.Tensor:
        pre, topk_weights, down, gate_up_bias, down_bias, A2, B2 = run.pending
        run.pending = ()
        activation = run.pieces.gate_forward(pre, run.order, run.gate, gate_up_bias)
        rows = run.products.matmul(activation, run.down(down))
        if A2 is not None:
            run.thin.add_matmul_(rows, run.thin.matmul(activation, A2), B2, run.scaling[1])
        return run.pieces.combine_rows(rows, run.order, topk_weights, run.topk_indices, down_bias)

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
        self.hidden, self.topk_weights, self.pre, self.low = ctx.saved_tensors
        self.gate_up, self.down, self.gate_up_bias, self.down_bias = ctx.kept.unchanged()[:4]
        self.A1, self.B1, self.A2, self.B2 = ctx.kept.unchanged()[4:]
        self.called: Run = ctx.run
        self.grad = grad
        needed = ctx.needs_input_grad
        self.needs_hidden, self.needs_weights = needed[0], needed[1]
        self.trains = _Trained(*needed[2:6])
        self.trains_adapters = (any(needed[6:8]), any(needed[8:10]))

    def run(self) -> tuple[torch.Tensor | None, ...]:
        run, choices = self.called, self.called.topk_indices.shape[1]
        g = run.pieces.gather_rows(self.grad, run.order, choices)
        activation_grad = run.products.matmul(g, run.down(self.down).mT)
        low_grad = None
        if self.A2 is not None:
            low_grad = run.thin.matmul(g, self.B2.mT)
            run.thin.add_matmul_(activation_grad, low_grad, self.A2.mT, run.scaling[1])
        pre_grad, weights_grad, weighted = run.pieces.gate_backward(
            self.pre, activation_grad, run.order, self.topk_weights, run.gate, self.gate_up_bias,
            with_activation=self.trains.down or self.trains_adapters[1],
        )  # fmt: skip
        del activation_grad
        down_grad = _outer_like(run.products, self.down, weighted, g) if self.trains.down else None
        A2_grad, B2_grad = self._second_adapter(weighted, g, low_grad)
        del g, weighted
        gate_up_bias_grad, down_bias_grad = self._biases(pre_grad)
        x = None
        if self.trains.gate_up or self.trains_adapters[0]:
            x = run.pieces.gather_rows(self.hidden, run.order, choices)
        gate_up_grad = _outer_like(run.products, self.gate_up, x, pre_grad) if self.trains.gate_up else None
        low_grad = None if self.A1 is None else run.thin.matmul(pre_grad, self.B1.mT)
        A1_grad, B1_grad = self._first_adapter(x, pre_grad, low_grad)
        del x
        return (
            self._hidden(pre_grad, low_grad), self._topk_weights(weights_grad), gate_up_grad, down_grad,
            gate_up_bias_grad, down_bias_grad, A1_grad, B1_grad, A2_grad, B2_grad, None,
        )  # fmt: skip

    def _hidden(self, pre_grad: torch.Tensor, low_grad: torch.Tensor | None) -> torch.Tensor | None:
        if not self.needs_hidden:
            return None
        run = self.called
        rows = run.products.matmul(pre_grad, run.gate_up(self.gate_up).mT)
        if low_grad is not None:
            run.thin.add_matmul_(rows, low_grad, self.A1.mT, run.scaling[0])
        return run.pieces.combine_rows(rows, run.order, None, run.topk_indices, None)

    def _topk_weights(self, grad: torch.Tensor) -> torch.Tensor | None:
        """<dout, y>: with the second bias, y is more than what the activation makes of it."""
        if not self.needs_weights:
            return None
        if self.down_bias is not None:
            with torch.autocast(grad.device.type, enabled=False):
                by_expert = self.grad.to(grad.dtype) @ self.down_bias.to(grad.dtype).t()
            indices, owned = self._owned()
            grad = grad + by_expert.gather(1, indices).where(owned, 0)
        return grad.to(self.topk_weights.dtype)

    def _owned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T, K] experts, zero where a pair has none, and whether it has one."""
        indices = self.called.topk_indices.long()
        owned = (indices >= 0) & (indices < len(self.called.order.offsets))
        return indices.where(owned, 0), owned

    def _biases(self, pre_grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sums of each expert's rows, as products with a matrix of ones: deterministic, and in fp32 inside."""
        gate_up_grad = down_grad = None
        order, experts = self.called.order, len(self.called.order.offsets)
        if self.trains.gate_up_bias:
            rows = torch.arange(len(order.pairs), dtype=torch.int32, device=pre_grad.device)
            expert = torch.searchsorted(order.offsets, rows, right=True)
            ones = (expert == torch.arange(experts, device=expert.device)[:, None]).to(pre_grad.dtype)
            owned = pre_grad.where((expert < experts)[:, None], 0)
            gate_up_grad = ones @ owned
        if self.trains.down_bias:
            indices, owned_pairs = self._owned()
            weights = self.topk_weights.where(owned_pairs, 0).to(torch.promote_types(torch.float32, self.grad.dtype))
            by_token = torch.zeros(len(indices), experts, dtype=weights.dtype, device=weights.device)
            for choice in range(indices.shape[1]):  # a token may name an expert twice
                by_token.scatter_add_(1, indices[:, choice : choice + 1], weights[:, choice : choice + 1])
            down_grad = by_token.to(self.grad.dtype).t() @ self.grad
        return gate_up_grad, down_grad

    def _first_adapter(self, x: Any, pre_grad: torch.Tensor, low_grad: Any) -> tuple[Any, Any]:
        if not self.trains_adapters[0]:
            return None, None
        thin, scaling = self.called.thin, self.called.scaling[0]
        return thin.outer(x, low_grad).mul_(scaling), thin.outer(self.low, pre_grad).mul_(scaling)

    def _second_adapter(self, weighted: Any, g: torch.Tensor, low_grad: Any) -> tuple[Any, Any]:
        """With w in the activation, dB = (w a A)^T g and dA = (w a)^T (g B^T)."""
        if not self.trains_adapters[1]:
            return None, None
        thin, scaling = self.called.thin, self.called.scaling[1]
        low = thin.matmul(weighted, self.A2)
        return thin.outer(weighted, low_grad).mul_(scaling), thin.outer(low, g).mul_(scaling)


def _outer_like(products: Products, weight: torch.Tensor, left: Any, right: Any) -> torch.Tensor:
    """outer(left, right) in the weight's own layout, so that adding it to `.grad` copies nothing."""
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return products.outer(right, left).mT
    return products.outer(left, right)
