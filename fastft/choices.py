"""Which implementation an op of a module gets, on the device where the module is now."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .capability import probe
from .errors import UnsupportedOptionError
from .modules.expert_layout import read_layout
from .modules.state import ReadPacked
from .ops import attention as attention_op
from .ops import gated_mlp as gated_mlp_op
from .ops import linear_cross_entropy as loss_op
from .ops import moe as moe_op
from .ops import rms_norm as rms_norm_op
from .ops import rope as rope_op
from .ops.selection import AUTO, Choice, select


def choose(op: str, requested: str, module: nn.Module, read_packed: ReadPacked) -> Choice:
    """The implementation of `op`, with its reason.

    Args:
        op: the option's name.
        requested: its value.
        module: that computes it.
        read_packed: finds weights that are held in 4 bits.

    Raises:
        UnsupportedOptionError: `requested` is unknown, or cannot run there.
    """
    weight = next(_decisive(op, module).parameters(), None)
    device = weight.device if weight is not None else torch.device("cpu")
    dtype = weight.dtype if weight is not None and weight.dtype.is_floating_point else torch.bfloat16
    if op == "lora":
        if requested not in (AUTO, "fused"):
            raise UnsupportedOptionError(f"lora: unknown implementation {requested!r}; choose 'auto', 'fused' or False")
        reason = "for each adapter whose forward it computes exactly, PEFT's own otherwise; asked at each call"
        return Choice("fused", reason)
    if device.type == "meta":
        return Choice(requested, "decided when the weights have a device")
    capability = probe(device)
    if op in ("rms_norm", "add_rms_norm"):
        size = weight.shape[-1] if weight is not None else 0
        return select(op, requested, rms_norm_op.verdicts(capability, dtype, hidden_size=size, weight_dtype=dtype))
    if op == "rope":
        return select(op, requested, rope_op.verdicts(capability, dtype))
    if op == "gated_mlp":
        return select(op, requested, gated_mlp_op.verdicts(capability, dtype))
    if op == "loss":
        choice = select(op, requested, loss_op.verdicts(capability, dtype))
        return Choice(
            choice.impl, f"where one of TRL's trainers asks a frozen head for log-probabilities; {choice.reason}"
        )
    if op == "experts":
        weights = read_layout(module, read_packed).weights
        aligned = moe_op.is_aligned(weights)
        return select(op, requested, moe_op.verdicts(capability, weights.gate_up.dtype, aligned=aligned))
    return _choose_attention(requested, module, device, dtype)


def _decisive(op: str, module: Any) -> nn.Module:
    """The part of a module whose weight tells where and in what dtype an op runs."""
    if op == "add_rms_norm":
        module = module.post_attention_layernorm
    elif op == "loss":
        module = module.get_output_embeddings()
    assert isinstance(module, nn.Module)
    return module


def _choose_attention(requested: str, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Choice:
    """Trainers run fp32 weights under bf16 autocast: what is asked for has to be possible in one of the two."""
    op, capability, head_dim = "attention", probe(device), getattr(module, "head_dim", 64)
    if dtype != torch.float32:
        return select(op, requested, attention_op.verdicts(capability, dtype, head_dim))
    autocast = select(op, requested, attention_op.verdicts(capability, torch.bfloat16, head_dim))
    if requested != AUTO:
        return autocast
    choice = select(op, requested, attention_op.verdicts(capability, dtype, head_dim))
    if autocast.impl == choice.impl:
        return choice
    return Choice(choice.impl, f"{choice.reason}; under bf16 autocast: {autocast.impl}")
