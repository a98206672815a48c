"""RoPE where offsets really pass 2**31 elements, on every axis, and on a device that is not the current one."""

from __future__ import annotations

import pytest
import torch

from fastft.ops.rope import rope_qk, rope_qk_
from fastft.ops.rope.launch import layout_of, plan_launch
from fastft.ops.rope.reference import rope_qk_reference

pytestmark = pytest.mark.gpu

FAR = 2**30 + 2**10  # three places of this stride end past 2**31
FAR_DIM = 2**31 // 63 + 16  # and 64 of this one


@pytest.fixture(scope="module")
def buffer():
    """4.3 GB of bf16, of which the tests use a few elements far from each other."""
    yield torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    torch.cuda.empty_cache()


def spread(buffer: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    view = buffer.as_strided(sizes, strides, offset)
    view.copy_(torch.randn(sizes, device=buffer.device))
    return view


def is_long(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, positions: torch.Tensor | None = None) -> bool:
    options = {"head_dim": None, "interleaved": False, "inverse": False, "in_place": False}
    layouts = (layout_of(q), layout_of(k)), layout_of(cos), None if positions is None else layout_of(positions)
    return plan_launch(*layouts, **options).constexprs["LONG_INDEXING"]


def check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions=None) -> None:
    """Both paths give what plain torch gives for a compact copy."""
    assert is_long(q, k, cos, positions)
    compact_q, compact_k = q.clone(memory_format=torch.contiguous_format), k.contiguous()
    expected = rope_qk_reference(compact_q, compact_k, cos.contiguous(), sin.contiguous(), position_ids=positions)
    got = rope_qk(q, k, cos, sin, position_ids=positions, impl="triton")
    written = rope_qk_(q, k, cos, sin, position_ids=positions, impl="triton")
    for want, out_of_place, in_place in zip(expected, got, written, strict=True):
        assert torch.equal(out_of_place, want) and torch.equal(in_place, want)


def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.rand(*shape, device="cuda") * 6.3
    return turn.cos(), turn.sin()


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        pytest.param((3, 4, 128), (FAR, 128, 1), id="token"),
        pytest.param((3, 3, 128), (128, FAR, 1), id="head"),
        pytest.param((3, 2, 64), (2, 1, FAR_DIM), id="dim"),
        pytest.param((3, 5, 4, 128), (FAR, 512, 128, 1), id="batch"),
    ],
)
def test_past_int32_along(buffer, sizes, strides):
    q = spread(buffer, sizes, strides)
    k = torch.randn(*sizes[:-2], 2, sizes[-1], device="cuda").to(torch.bfloat16)
    cos, sin = angles(*sizes[:-2], sizes[-1] // 2)
    check(q, k, cos, sin)
    check(k, spread(buffer, sizes, strides), cos, sin)


def test_past_int32_along_the_table(buffer):
    cos, sin = (spread(buffer, (3, 32), (FAR, 1), offset) for offset in (0, 64))
    q, k = (torch.randn(5, heads, 64, device="cuda").to(torch.bfloat16) for heads in (4, 2))
    check(q, k, cos, sin, torch.tensor([2, 0, 1, 2, 1], device="cuda"))
    check(q[:3], k[:3], cos, sin)


def test_past_int32_along_the_positions():
    storage = torch.zeros(2**31 + 2**12, dtype=torch.int32, device="cuda")  # 8.6 GB
    positions = storage.as_strided((3,), (FAR,))
    positions.copy_(torch.tensor([4, 0, 3], device="cuda"))
    q, k = (torch.randn(3, heads, 64, device="cuda").to(torch.bfloat16) for heads in (4, 2))
    check(q, k, *angles(5, 32), positions)


def test_contiguous_past_int32_forward_and_backward():
    """524,291 tokens of 32 heads: 2**31 elements of q and some more, 13 GB with its result and its gradient."""
    tokens = 2**19 + 3
    q = torch.randn(tokens, 32, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k = torch.randn(tokens, 1, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    cos, sin = angles(tokens, 64)
    out_q, out_k = rope_qk(q, k, cos, sin, impl="triton")
    dq, dk = torch.autograd.grad((out_q, out_k), (q, k), (q.detach(), k.detach()))
    for part in (slice(0, 3), slice(2**18 - 2, 2**18 + 2), slice(tokens - 5, tokens)):
        expected = rope_qk_reference(q[part], k[part], cos[part], sin[part])
        backward = rope_qk_reference(q[part], k[part], cos[part], -sin[part])
        assert torch.equal(out_q[part], expected[0]) and torch.equal(out_k[part], expected[1])
        assert torch.equal(dq[part], backward[0]) and torch.equal(dk[part], backward[1])


def test_tensors_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    q, k = (torch.randn(5, heads, 64, device="cuda:1") for heads in (4, 2))
    turn = torch.rand(5, 32, device="cuda:1")
    with torch.cuda.device(0):
        got = rope_qk(q, k, turn.cos(), turn.sin(), impl="triton")
    torch.cuda.synchronize(1)
    for result, expected in zip(got, rope_qk_reference(q, k, turn.cos(), turn.sin()), strict=True):
        assert result.device.index == 1 and torch.equal(result, expected)
