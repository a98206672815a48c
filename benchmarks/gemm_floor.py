"""The GEMM floor of a training step: what its matrix products alone take at the model's own shapes.

Forward, dX and (where the weight is trained) dW of every projection, expert and the LM head, on random bfloat16 data.
Left out: attention, the rank-16 products of LoRA (an epilogue can hide them), and everything elementwise. With gradient
checkpointing the layers' forward runs twice; that recompute is a part of its own and not in the floor, because a better
plan can avoid it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Projection:
    """One weight [out_features, in_features] (times `experts`) that meets `tokens` rows, `count` times a step."""

    name: str
    tokens: int
    in_features: int
    out_features: int
    count: int
    experts: int = 1
    head: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of one of forward, dX, dW: 2 tokens in out, the same for all three."""
        return 2 * self.tokens * self.in_features * self.out_features


def projections(config: Any, tokens: int) -> list[Projection]:
    """The projections of a transformers config at `tokens` tokens a step (each token goes to top-k experts)."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    found = [
        Projection("q_proj", tokens, hidden, query, layers),
        Projection("k_proj, v_proj", tokens, hidden, key_value, 2 * layers),
        Projection("o_proj", tokens, query, hidden, layers),
    ]
    top_k = getattr(config, "num_experts_per_tok", None)
    if top_k:
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        found += [
            Projection("router", tokens, hidden, experts, layers),
            Projection("experts gate_up", tokens * top_k, hidden, 2 * inner, layers, experts),
            Projection("experts down", tokens * top_k, inner, hidden, layers, experts),
        ]
    else:
        inner = config.intermediate_size
        found += [
            Projection("gate_proj, up_proj", tokens, hidden, inner, 2 * layers),
            Projection("down_proj", tokens, inner, hidden, layers),
        ]
    return [*found, Projection("lm_head", tokens, hidden, config.vocab_size, 1, head=True)]


def parts_of(projection: Projection, *, train_weights: bool, checkpointing: bool) -> list[tuple[str, str]]:
    """The (part of the step, product) pairs that a projection takes part in."""
    owner = "head" if projection.head else "layers"
    parts = [(f"{owner} forward", "forward"), (f"{owner} dX", "dX")]
    if train_weights:
        parts.append((f"{owner} dW", "dW"))
    if checkpointing and not projection.head:
        parts.append(("layers recompute", "forward"))
    return parts


def floor_flops(config: Any, tokens: int, *, train_weights: bool, checkpointing: bool) -> dict[str, int]:
    """FLOPs of each part of a step; "layers recompute" is there only with checkpointing."""
    parts: dict[str, int] = defaultdict(int)
    for projection in projections(config, tokens):
        for part, _ in parts_of(projection, train_weights=train_weights, checkpointing=checkpointing):
            parts[part] += projection.flops * projection.count
    return dict(parts)


def median_ms(function: Callable[[], Any], warmup: int = 3, repeats: int = 15) -> float:
    """Median time of a call on the GPU, from CUDA events."""
    for _ in range(warmup):
        function()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def _products(projection: Projection, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    tokens, inputs, outputs = projection.tokens, projection.in_features, projection.out_features

    def data(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, dy = data(tokens, inputs), data(tokens, outputs)
    if projection.experts == 1:
        weight = data(outputs, inputs)
        return {"forward": lambda: x @ weight.T, "dX": lambda: dy @ weight, "dW": lambda: dy.T @ x}
    grouped = torch.nn.functional.grouped_mm
    weights = data(projection.experts, outputs, inputs)
    # Even routing: the floor is that of a balanced batch.
    ends = torch.arange(1, projection.experts + 1, device=device, dtype=torch.int64) * tokens // projection.experts
    offs = ends.to(torch.int32)
    return {
        "forward": lambda: grouped(x, weights.transpose(1, 2), offs=offs),
        "dX": lambda: grouped(dy, weights, offs=offs),
        "dW": lambda: grouped(dy.T, x, offs=offs),
    }


def measure_floor(
    config: Any, tokens: int, *, train_weights: bool, checkpointing: bool, device: torch.device
) -> dict[str, Any]:
    """Measures every product of a step and sums it by part.

    Returns:
        `parts_ms` and `parts_tflop` by part, `floor_ms` (all but the recompute), `recompute_ms`, `tflops` (rate of the
        floor) and `products`: the median of each product.
    """
    parts: dict[str, float] = defaultdict(float)
    products = []
    for projection in projections(config, tokens):
        wanted = parts_of(projection, train_weights=train_weights, checkpointing=checkpointing)
        functions = _products(projection, device)
        times = {product: median_ms(functions[product]) for product in {product for _, product in wanted}}
        for part, product in wanted:
            parts[part] += times[product] * projection.count
        for product, ms in sorted(times.items()):
            rate = projection.flops / ms / 1e9
            products.append(
                {"name": projection.name, "product": product, "ms": ms, "tflops": rate, "count": projection.count}
            )
        del functions
    flops = floor_flops(config, tokens, train_weights=train_weights, checkpointing=checkpointing)
    floor = sum(ms for part, ms in parts.items() if part != "layers recompute")
    return {
        "tokens": tokens,
        "parts_ms": dict(parts),
        "parts_tflop": {part: count / 1e12 for part, count in flops.items()},
        "floor_ms": floor,
        "recompute_ms": parts.get("layers recompute", 0.0),
        "tflops": sum(count for part, count in flops.items() if part != "layers recompute") / floor / 1e9,
        "products": products,
    }
