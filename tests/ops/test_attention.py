"""Packed attention: every engine against an fp64 oracle, isolation of documents, dropout, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import make_case

from fastft.ops.attention import reference, sdpa, varlen_attention
from fastft.packing import PackedSequences

gpu = pytest.mark.gpu
ON_CPU = [
    pytest.param((impl, "cpu", dtype), id=f"{impl}-cpu-{str(dtype).removeprefix('torch.')}")
    for impl in ("reference", "sdpa")
    for dtype in (torch.float32, torch.bfloat16)
]
ON_GPU = [
    pytest.param((impl, "cuda", dtype), id=f"{impl}-cuda-{str(dtype).removeprefix('torch.')}", marks=gpu)
    for impl, dtypes in {
        "reference": (torch.float32, torch.bfloat16),
        "sdpa": (torch.float32, torch.float16, torch.bfloat16),
        "fa2": (torch.float16, torch.bfloat16),
    }.items()
    for dtype in dtypes
]


@pytest.fixture(params=ON_CPU + ON_GPU)
def engine(request):
    """(implementation, device, dtype)"""
    return request.param


def check(engine, lengths, **options):
    impl, device, dtype = engine
    case = make_case(lengths, dtype=dtype, device=device, **options)
    got = case.run(impl)
    assert all(tensor.dtype == dtype for tensor in got.values())
    case.assert_within_budget(impl, got)


# ------------------------------------------------------------------------------------------------ error budget

LENGTHS = {
    "one token": (1,),
    "one document": (29,),
    "primes": (7, 31, 2, 13, 1),
    "one-token documents": (1,) * 40,
    "blocks of 64 and their neighbours": (63, 64, 65),
    "long and short": (150, 1, 1, 3),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(engine, lengths, causal):
    check(engine, lengths, causal=causal)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 1), (3, 1), (6, 2)])
def test_grouped_queries(engine, heads, key_heads):
    check(engine, (19, 5, 40), heads=heads, key_heads=key_heads)


@pytest.mark.parametrize("head_dim", [16, 20, 64, 72, 80, 128, 256])
def test_head_dimensions(engine, head_dim):
    check(engine, (19, 5, 40), head_dim=head_dim)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "window_size",
    [(0, 0), (0, None), (1, 1), (5, None), (None, 3), (5, 2), (30, None), (38, 38), (39, 39), (10**12, 10**12)],
)
def test_windows(engine, window_size, causal):
    check(engine, (40, 3, 1, 17), window_size=window_size, causal=causal)


@pytest.mark.parametrize("softmax_scale", [1.0, 0.03])
def test_scale(engine, softmax_scale):
    check(engine, (19, 5, 40), softmax_scale=softmax_scale)


@pytest.mark.parametrize("layout", ["fused", "transposed", "odd"])
@pytest.mark.parametrize("head_dim", [32, 20])
def test_layouts(engine, layout, head_dim):
    check(engine, (19, 5, 40), layout=layout, head_dim=head_dim)


def test_any_other_strides(engine):
    impl, device, dtype = engine
    case = make_case((9, 6), dtype=dtype, device=device)
    across = replace(
        case, q=case.q.mT.contiguous().mT, k=case.k.flip(0).flip(0)[:, :, :], v=case.v[:, :1].expand_as(case.v)
    )
    across.assert_within_budget(impl, across.run(impl))


def test_expanded_gradient(engine):
    impl, device, dtype = engine
    case = make_case((19, 5, 40), dtype=dtype, device=device)
    case = replace(case, grad=torch.ones((), device=device, dtype=dtype).expand(case.q.shape))
    case.assert_within_budget(impl, case.run(impl))


def test_a_gradient_that_starts_anywhere(engine):
    impl, device, dtype = engine
    case = make_case((19, 5, 40), dtype=dtype, device=device)
    anywhere = torch.empty(case.grad.numel() + 1, dtype=dtype, device=device)[1:].view_as(case.grad).copy_(case.grad)
    case.assert_within_budget(impl, replace(case, grad=anywhere).run(impl))


@pytest.mark.parametrize("window_size", [(None, None), (100, None), (50, 70)])
def test_documents_longer_than_a_block_of_queries(engine, window_size, monkeypatch):
    monkeypatch.setattr(reference, "_QUERY_BLOCK", 64)
    monkeypatch.setattr(sdpa, "_QUERY_BLOCK", 64)
    check(engine, (200, 64, 65), window_size=window_size, causal=window_size[1] is None)


def test_a_document_longer_than_the_real_block():
    for impl in ("reference", "sdpa"):
        check((impl, "cpu", torch.float32), (1100,), heads=1, key_heads=1, head_dim=8, window_size=(1050, None))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(engine, lengths):
    impl, device, dtype = engine
    got = make_case(lengths, dtype=dtype, device=device).run(impl)
    assert got["out"].shape == got["dq"].shape == (0, 4, 32)
    assert got["dk"].shape == got["dv"].shape == (0, 2, 32)
    assert all(tensor.dtype == dtype for tensor in got.values())


@pytest.mark.parametrize(
    "lengths", [(0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 0), (0, 9, 0, 0, 5, 0)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("causal", [True, False])
def test_empty_documents_that_only_the_device_knows(engine, lengths, causal):
    """As boundaries on a device arrive: nobody could drop the empty documents. 3:1 grouped queries, max_seqlen 1."""
    impl, device, dtype = engine
    case = make_case(lengths, heads=3, key_heads=1, dtype=dtype, device=device, causal=causal, head_dim=64)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    unread = PackedSequences(ends.int(), None, max(lengths), sum(lengths))
    case.assert_within_budget(impl, case.run(impl, unread))


def test_longest_may_be_an_upper_bound(engine):
    impl, device, dtype = engine
    case = make_case((9, 6), dtype=dtype, device=device, window_size=(3, None))
    loose = PackedSequences(case.packed.cu_seqlens, None, 500, 15)
    case.assert_within_budget(impl, case.run(impl, loose))


@pytest.mark.parametrize("causal", [True, False])
def test_reference_is_the_oracle(causal):
    case = make_case((7, 31, 2), dtype=torch.float64, window_size=(9, 4), causal=causal)
    for impl in ("reference", "sdpa"):
        got, oracle = case.run(impl), case.oracle()
        assert all(torch.allclose(got[name], oracle[name], rtol=1e-12, atol=1e-13) for name in oracle)


def test_gradients_by_finite_differences():
    case = make_case((4, 3), head_dim=4, heads=2, key_heads=1, dtype=torch.float64, window_size=(2, None))
    inputs = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    for impl in ("reference", "sdpa"):
        call = lambda q, k, v, impl=impl: varlen_attention(q, k, v, case.packed, window_size=(2, None), impl=impl)  # noqa: E731
        assert torch.autograd.gradcheck(call, inputs)


# ------------------------------------------------------------------------------------------------ mutants


def test_mutants_are_caught(engine):
    impl, device, dtype = engine
    case = make_case((40, 3, 1, 17), dtype=dtype, device=device, window_size=(9, None))
    got = case.run(impl)
    case.assert_within_budget(impl, got)
    no_boundaries = PackedSequences.from_lengths([61], device)
    one_boundary_less = PackedSequences.from_lengths([40, 4, 17], device)
    mutants = [
        case.run(impl, no_boundaries),
        case.run(impl, one_boundary_less),
        case.run(impl, window_size=(10, None)),
        case.run(impl, window_size=(8, None)),
        case.run(impl, causal=False),
        *({**got, name: got[name] * 1.05} for name in ("dq", "dk", "dv")),
    ]
    for mutant in mutants:
        case.assert_mutant_caught(impl, mutant)


# ------------------------------------------------------------------------------------------------ isolation


@pytest.mark.parametrize("window_size", [(None, None), (5, None)])
@pytest.mark.parametrize("causal", [True, False])
def test_other_documents_change_nothing_bitwise(engine, window_size, causal):
    """Documents shorter than a block of keys: beyond it FlashAttention-2 adds up dq in any order."""
    impl, device, dtype = engine
    case = make_case((23, 31, 7), dtype=dtype, device=device, window_size=window_size, causal=causal, head_dim=64)
    first, second, third = slice(0, 23), slice(23, 54), slice(54, 61)
    before, after = case.run(impl), case.with_other_numbers_in(second).run(impl)
    for name in before:
        assert torch.equal(before[name][first], after[name][first])
        assert torch.equal(before[name][third], after[name][third])
        assert not torch.equal(before[name][second], after[name][second])
    merged = PackedSequences.from_lengths([54, 7], device)  # the mutant: one boundary removed
    before, after = case.run(impl, merged), case.with_other_numbers_in(second).run(impl, merged)
    assert not all(torch.equal(before[name][first], after[name][first]) for name in before)


def test_nan_stays_within_its_document(engine):
    impl, device, dtype = engine
    case = make_case((23, 31, 7), dtype=dtype, device=device)
    clean = case.run(impl)
    case.v[30] = case.k[40] = float("nan")
    got = case.run(impl)
    for rows in (slice(0, 23), slice(54, 61)):
        assert all(torch.equal(got[name][rows], clean[name][rows]) for name in got)


def test_inputs_and_gradients_are_not_written(engine):
    impl, device, dtype = engine
    case = make_case((19, 5, 40), dtype=dtype, device=device, layout="fused")
    before = [x.clone() for x in (case.q, case.k, case.v, case.grad, case.packed.cu_seqlens)]
    case.run(impl)
    after = (case.q, case.k, case.v, case.grad, case.packed.cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_every_number_is_written(engine, poisoned_empty):
    check(engine, (19, 5, 40), layout="fused")
    check(engine, (19, 5, 40), head_dim=20)


def test_frozen_inputs_get_no_gradient(engine):
    impl, device, dtype = engine
    case = make_case((9, 6), dtype=dtype, device=device)
    q = case.q.detach().requires_grad_()
    varlen_attention(q, case.k, case.v, case.packed, impl=impl).backward(case.grad)
    assert torch.equal(q.grad, case.run(impl)["dq"])
    assert case.k.grad is None
    with torch.no_grad():
        assert not varlen_attention(q, case.k, case.v, case.packed, impl=impl).requires_grad


# ------------------------------------------------------------------------------------------------ dropout


def test_dropout_follows_the_seed_and_keeps_the_mean(engine):
    impl, device, dtype = engine
    case = make_case((37, 91), dtype=dtype, device=device, causal=False)
    case = replace(case, v=case.v.abs() + 1)

    def dropped(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return case.run(impl, dropout=0.3)

    first, again, other, plain = dropped(1), dropped(1), dropped(2), case.run(impl)
    assert torch.equal(first["out"], again["out"])
    assert torch.equal(first["dv"], again["dv"])  # the backward dropped what the forward dropped
    assert not torch.equal(first["out"], other["out"])
    assert not torch.equal(first["out"], plain["out"])
    mean = torch.stack([dropped(seed)["out"].double() for seed in range(20)]).mean()
    assert mean.item() == pytest.approx(plain["out"].double().mean().item(), rel=0.02)


# ------------------------------------------------------------------------------------------------ memory


def test_no_mask_over_all_tokens(monkeypatch):
    """128 documents of 8 tokens: nothing may be anywhere near 1024 x 1024."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    monkeypatch.setattr(PackedSequences, "attention_mask", None)
    case = make_case((8,) * 128, heads=2, key_heads=1, head_dim=8, window_size=(3, None))
    for impl in ("reference", "sdpa"):
        with Watch():
            case.run(impl)
    assert case.q.numel() <= largest <= 4 * case.q.numel()


def test_a_window_reads_only_the_keys_it_needs(monkeypatch):
    monkeypatch.setattr(sdpa, "_QUERY_BLOCK", 64)
    widths = []
    original = sdpa.scaled_dot_product_attention

    def spy(q, k, v, **options):
        widths.append((q.shape[2], k.shape[2], tuple(options["attn_mask"].shape)))
        return original(q, k, v, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    make_case((200,), window_size=(10, None)).run("sdpa")
    assert widths == [(64, 64, (64, 64)), (64, 74, (64, 74)), (64, 74, (64, 74)), (8, 18, (8, 18))]


@gpu
@pytest.mark.parametrize("impl", ["fa2", "sdpa"])
def test_memory_grows_with_the_tokens(impl):
    case = make_case((512,) * 64, heads=8, key_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    case.run(impl)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.run(impl)
    assert torch.cuda.max_memory_allocated() - before < 24 * case.q.numel() * 2  # a T x T mask is 1 GiB, q 32 MiB


@gpu
def test_fa2_waits_for_nothing():
    case = make_case((40, 3, 1, 17), dtype=torch.bfloat16, device="cuda", window_size=(9, None))
    unread = PackedSequences(case.packed.cu_seqlens, None, 40, 61)
    case.run("fa2", unread)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run("fa2", unread)
    finally:
        torch.cuda.set_sync_debug_mode("default")
