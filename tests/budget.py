"""The error budget: an implementation may err at most twice as much as same-dtype eager torch, plus one rounding.

Both are measured against an oracle computed in fp64 from the same (already rounded) inputs, by three measures:
largest absolute error, root mean square error, and the worst relative error of a row. A test passes tensors by
name, outputs and gradients alike, and a companion test hands in a mutant that must fail.

The measures are statistics: the error of a handful of numbers, or of a sum that cancels, is luck for both sides. Give
each tensor at least a few dozen numbers, from several draws if need be.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

FACTOR = 2.0
NO_ERROR = {"max": 0.0, "rms": 0.0, "row": 0.0}
# A row that is tiny beside the typical one is measured against this share of the typical one.
SMALLEST_ROW = 1e-3


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().double().cpu()
    return tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else tensor.numel())


def _errors(value: torch.Tensor, oracle: torch.Tensor) -> dict[str, float]:
    if value.numel() == 0:
        return NO_ERROR
    difference, oracle = (_as_rows(value) - _as_rows(oracle)).abs(), _as_rows(oracle)
    typical_row = oracle.norm() / oracle.shape[0] ** 0.5
    norms = oracle.norm(dim=-1).clamp_min(typical_row * SMALLEST_ROW + 1e-300)
    return {
        "max": difference.max().item(),
        "rms": difference.square().mean().sqrt().item(),
        "row": (difference.norm(dim=-1) / norms).max().item(),
    }


def _rounding(oracle: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    if oracle.numel() == 0:
        return NO_ERROR
    oracle = oracle.detach().double().cpu()
    half_ulp = torch.finfo(dtype).eps / 2
    return {
        "max": half_ulp * oracle.abs().max().item(),
        "rms": half_ulp * oracle.square().mean().sqrt().item(),
        "row": half_ulp,
    }


def budget_violations(
    candidate: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
) -> list[str]:
    """Every measure of every tensor in which `candidate` exceeds the budget, as text; empty when all is well.

    `eager` and `oracle` are the yardstick: they must be complete, of one shape, and finite, or the test is wrong.
    """
    assert candidate, "nothing to compare"
    assert candidate.keys() == eager.keys() == oracle.keys()
    violations = []
    for name, value in candidate.items():
        for yardstick in (eager[name], oracle[name]):
            assert torch.isfinite(yardstick).all(), f"{name}: the yardstick is not finite, so any error would pass"
            assert yardstick.shape == oracle[name].shape, f"{name}: eager and oracle differ in shape"
        if value.shape != oracle[name].shape:
            violations.append(f"{name}: shape {tuple(value.shape)}, expected {tuple(oracle[name].shape)}")
            continue
        if not torch.isfinite(value).all():
            violations.append(f"{name}: not finite")
            continue
        got, allowed = _errors(value, oracle[name]), _errors(eager[name], oracle[name])
        slack = _rounding(oracle[name], value.dtype)
        for measure, error in got.items():
            limit = FACTOR * allowed[measure] + slack[measure]
            if error > limit:
                violations.append(
                    f"{name}: {measure} error {error:.3e} over {limit:.3e} (eager {allowed[measure]:.3e})"
                )
    return violations


def assert_within_budget(
    candidate: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
) -> None:
    violations = budget_violations(candidate, eager, oracle)
    if violations:
        pytest.fail("error budget exceeded:\n  " + "\n  ".join(violations), pytrace=False)


def assert_mutant_caught(
    mutant: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
) -> None:
    """The budget must reject `mutant`; a test whose budget accepts it proves nothing."""
    assert budget_violations(mutant, eager, oracle), "the error budget accepted a mutant"
