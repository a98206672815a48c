"""The error budget itself: it accepts what eager torch would do, and each of its measures rejects something alone."""

from __future__ import annotations

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget, budget_violations

ROWS, WIDTH = 50, 64


@pytest.fixture
def oracle():
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def noisy(oracle, size):
    """The oracle with an error of exactly `size`, relative, in every element and in a random direction."""
    return oracle * (1 + size * torch.randn_like(oracle).sign())


def violations(value, eager, oracle):
    return budget_violations({"y": value}, {"y": eager}, {"y": oracle})


def measures(found):
    return {text.split()[1] for text in found}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accepts_eager_and_one_rounding_of_the_oracle(oracle, dtype):
    rounded = oracle.to(dtype)
    assert_within_budget({"y": rounded}, {"y": rounded}, {"y": oracle})
    assert not violations(rounded, oracle, oracle)


def test_accepts_twice_the_error_of_eager_and_no_more(oracle):
    eager = noisy(oracle, 1e-3)
    assert not violations(noisy(oracle, 1.999e-3), eager, oracle)
    assert measures(violations(noisy(oracle, 2.001e-3), eager, oracle)) >= {"max", "rms"}


def test_each_measure_rejects_alone(oracle):
    eager = noisy(oracle, 1e-3)
    one_element = eager.clone()
    largest = oracle.abs().argmax()
    one_element.view(-1)[largest] = oracle.view(-1)[largest] * 1.003
    assert measures(violations(one_element, eager, oracle)) == {"max"}

    oracle[3] *= 1e-2  # so small that its error is lost among the others, except relative to itself
    eager = noisy(oracle, 1e-3)
    small_row = eager.clone()
    small_row[3] = oracle[3] * 1.02
    assert measures(violations(small_row, eager, oracle)) == {"row"}

    everywhere = oracle + 2.5e-3 * oracle.square().mean().sqrt()  # below the largest error, above the typical one
    assert "rms" in measures(violations(everywhere, eager, oracle))
    assert "max" not in measures(violations(everywhere, eager, oracle))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rejects_what_is_not_finite(oracle, bad):
    value = oracle.clone()
    value[7, 7] = bad
    assert violations(value, oracle, oracle) == ["y: not finite"]


def test_rejects_another_shape(oracle):
    assert violations(oracle[:1], oracle, oracle) == [f"y: shape (1, {WIDTH}), expected ({ROWS}, {WIDTH})"]


@pytest.mark.parametrize("role", ["eager", "oracle"])
def test_a_yardstick_that_is_not_finite_fails_the_test(oracle, role):
    broken = oracle.clone()
    broken[0, 0] = float("nan")
    yardsticks = {"eager": oracle, "oracle": oracle} | {role: broken}
    with pytest.raises(AssertionError, match="yardstick is not finite"):
        violations(oracle, **yardsticks)


def test_a_missing_gradient_fails_the_test(oracle):
    both = {"y": oracle, "dx": oracle}
    with pytest.raises(AssertionError):
        budget_violations({"y": oracle}, both, both)
    with pytest.raises(AssertionError, match="nothing to compare"):
        budget_violations({}, {}, {})


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (0, 4), (3, 0), (2, 3, 4)], ids=str)
def test_any_shape(shape):
    oracle = torch.randn(shape, dtype=torch.float64)
    assert not violations(oracle.float(), oracle.float(), oracle)
    if oracle.numel():
        assert violations(oracle.float() * 1.01, oracle.float(), oracle)


def test_an_oracle_of_zeros_tolerates_no_error():
    zeros = torch.zeros(4, 8, dtype=torch.float64)
    assert not violations(zeros.float(), zeros.float(), zeros)
    assert violations(zeros.float() + 1e-30, zeros.float(), zeros)


def test_the_assertions_name_what_is_over(oracle):
    eager, wrong = {"y": oracle.float(), "dx": oracle.float()}, {"y": oracle.float(), "dx": oracle.float() * 1.1}
    oracles = {"y": oracle, "dx": oracle}
    with pytest.raises(pytest.fail.Exception, match="dx: max error"):
        assert_within_budget(wrong, eager, oracles)
    assert_mutant_caught(wrong, eager, oracles)
    with pytest.raises(AssertionError, match="accepted a mutant"):
        assert_mutant_caught(eager, eager, oracles)
