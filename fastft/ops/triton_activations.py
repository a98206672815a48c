"""Gated activations as functions for kernels: the value, and the derivatives by both halves, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    """e^x to two units in the last place: of x log2(e), what fp32 rounds away is as much as x is large."""
    power = x * 1.4426950408889634
    lost = tl.fma(x, 1.4426950408889634, -power) + x * 1.9259629911266174e-08
    lost = tl.where(power > -200, lost, 0.0)  # infinite numbers have no rest
    return tl.exp2(power) * (1 + 0.6931471805599453 * lost)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x), and what is left to one: exact where the difference would have cancelled."""
    small = _exp(-tl.abs(x))
    larger = 1 / (1 + small)
    smaller = small * larger
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def _swish(x, alpha: tl.constexpr):
    sigmoid, rest = _sigmoid(alpha * x)
    return x * sigmoid, sigmoid * (1 + alpha * x * rest)


@triton.jit
def activate(g, u, ACTIVATION: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr):
    """The activation, and its derivatives by g and by u. Comparisons are such that NaN stays NaN."""
    if ACTIVATION == "clamped_swish":
        beyond = g > limit
        above, below = u > limit, u < -limit
        g = tl.where(beyond, limit, g)
        u = tl.where(above, limit, tl.where(below, -limit, u)) + 1
        act, slope = _swish(g, alpha)
        by_u = tl.where(above | below, 0.0, act)
        by_g = tl.where(beyond, 0.0, slope * u)
    else:
        if ACTIVATION == "silu":
            act, slope = _swish(g, 1.0)
        elif ACTIVATION == "gelu":
            cumulative = 0.5 * (1 + tl.erf(g * 0.7071067811865476))
            act = g * cumulative
            slope = cumulative + g * _exp(-0.5 * g * g) * 0.3989422804014327
        else:
            inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
            half, rest = _sigmoid(2 * inner)  # (1 + tanh(inner)) / 2
            act = g * half
            slope = half + 2 * g * half * rest * 0.7978845608028654 * (1 + 0.134145 * g * g)
        by_g, by_u = slope * u, act
    return act * u, by_g, by_u
