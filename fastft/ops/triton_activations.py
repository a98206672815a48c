"""Gated activations as functions for kernels: the value, and the derivatives by both halves, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_nonpositive(x, EXACT: tl.constexpr):
    """e^x of x <= 0: to a unit in the last place with EXACT, else to some, of x log2(e) in two parts."""
    if EXACT:
        x = tl.where(x < -104.0, -104.0, x)  # zero from there on; NaN stays NaN
        power = tl.floor(x * 1.4426950408889634 + 0.5)
        rest = tl.fma(power, -0.693359375, x)  # ln(2) in two parts, of which the first has few digits
        rest = tl.fma(power, 2.12194440e-4, rest)
        series = tl.fma(rest, 1.9841270e-4, 1.3888889e-3)
        series = tl.fma(rest, series, 8.3333333e-3)
        series = tl.fma(rest, series, 4.1666667e-2)
        series = tl.fma(rest, series, 1.6666667e-1)
        series = tl.fma(rest, series, 0.5)
        return (1 + tl.fma(rest * rest, series, rest)) * tl.exp2(power)
    power = x * 1.4426950408889634
    lost = tl.fma(x, 1.4426950408889634, -power) + x * 1.9259629911266174e-08
    lost = tl.where(power > -200, lost, 0.0)  # infinite numbers have no rest
    return tl.exp2(power) * (1 + 0.6931471805599453 * lost)


@triton.jit
def _divide(x, y, EXACT: tl.constexpr):
    """x / y: rounded as IEEE says with EXACT, else to two units in the last place."""
    if EXACT:
        return tl.div_rn(x, y)
    return x / y


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    """1 / (1 + e^-x), and what is left to one: exact where the difference would have cancelled."""
    small = exp_nonpositive(-tl.abs(x), EXACT)
    larger = _divide(tl.full([], 1.0, tl.float32), 1 + small, EXACT)
    smaller = small * larger
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def _swish(x, alpha: tl.constexpr, EXACT: tl.constexpr):
    sigmoid, rest = _sigmoid(alpha * x, EXACT)
    return x * sigmoid, sigmoid * (1 + alpha * x * rest)


@triton.jit
def _gauss(x, EXACT: tl.constexpr):
    """The normal distribution's cumulative function and density, both to some units in the last place for any x.

    1 + erf would cancel where x is negative. Of z = |x| / sqrt(2), erfc(z) e^(z^2) (1 + 2 z) is a polynomial in
    (z - 3) / (z + 3), fitted on Chebyshev's nodes to 5e-9.
    """
    square = x * x
    density = exp_nonpositive(-0.5 * square, EXACT) * (1 - 0.5 * tl.fma(x, x, -square))
    z = tl.abs(x) * 0.7071067811865476
    z = tl.where(z > 20.0, 20.0, z)  # where the density is zero
    density = tl.where(z >= 20.0, 0.0, density)  # of infinite numbers the square has no rest
    q = _divide(z - 3, z + 3, EXACT)
    tail = tl.fma(q, 7.73102422e-05, -9.25451668e-05)
    tail = tl.fma(q, tail, -0.000726453679)
    tail = tl.fma(q, tail, 0.00187507912)
    tail = tl.fma(q, tail, 0.00249911687)
    tail = tl.fma(q, tail, -0.0237635764)
    tail = tl.fma(q, tail, 0.0683165678)
    tail = tl.fma(q, tail, -0.119275275)
    tail = tl.fma(q, tail, 0.129644114)
    tail = tl.fma(q, tail, -0.0475621569)
    tail = tl.fma(q, tail, -0.135621069)
    tail = tl.fma(q, tail, 1.25300806)
    tail = 0.5 * density * _divide(tail, 1 + 2 * z, EXACT)
    return tl.where(x < 0, tail, 1 - tail), density * 0.3989422804014327


@triton.jit
def activate(g, u, ACTIVATION: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, EXACT: tl.constexpr):
    """The activation times u, and its derivatives by g and by u. Comparisons are such that NaN stays NaN.

    EXACT is for results in fp32: it costs some instructions, which 16 bits would not show.
    """
    if ACTIVATION == "clamped_swish":
        beyond = g > limit
        above, below = u > limit, u < -limit
        g = tl.where(beyond, limit, g)
        u = tl.where(above, limit, tl.where(below, -limit, u)) + 1
        act, slope = _swish(g, alpha, EXACT)
        by_u = tl.where(above | below, 0.0, act)
        by_g = tl.where(beyond, 0.0, slope * u)
    else:
        if ACTIVATION == "silu":
            act, slope = _swish(g, 1.0, EXACT)
        elif ACTIVATION == "gelu":
            cumulative, density = _gauss(g, EXACT)
            act = g * cumulative
            slope = cumulative + g * density
        else:
            inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
            half, rest = _sigmoid(2 * inner, EXACT)  # (1 + tanh(inner)) / 2
            act = g * half
            slope = half + 2 * g * half * rest * 0.7978845608028654 * (1 + 0.134145 * g * g)
        by_g, by_u = slope * u, act
    return act * u, by_g, by_u
