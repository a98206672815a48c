"""The FlashAttention-2 engine around its kernel: what it hands over, fake tensors, torch.compile, checkpoints.

Without a GPU a stand-in takes the kernel's place. It refuses what the kernel refuses or would get wrong, and reads
the window as the kernel does.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import Case, make_case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastft.ops.attention import fa2
from fastft.ops.attention.fa2 import varlen_attention_fa2
from fastft.packing import PackedSequences

DTYPES = [torch.float16, torch.bfloat16]


class StandIn:
    """PyTorch's two operators, in fp32 and by brute force."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.handed_over: list[tuple] = []

    def attend(self, q, k, v, cu_seqlens, max_seqlen, causal, softmax_scale, left, right):
        for x in (q, k, v):
            assert x.stride(2) == 1
            assert x.shape[2] % 8 == 0
            assert all(number * x.element_size() % 16 == 0 for number in (*x.stride()[:2], x.storage_offset()))
        assert cu_seqlens.dtype == torch.int32
        assert max_seqlen > 1
        assert -1 <= left < 2**31
        assert -1 <= right < 2**31
        case = Case(
            q.float(), k.float(), v.float(), q, tuple(cu_seqlens.diff().tolist()), causal=causal,
            window_size=(None if left < 0 else left, None if right < 0 else right), softmax_scale=softmax_scale,
        )  # fmt: skip
        return case._dense(case.q, case.k, case.v)

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **window):
        self.calls["forward"] += 1
        assert cu_q is cu_k or torch.equal(cu_q, cu_k)
        assert max_q == max_k
        assert not debug
        options = (causal, scale, window["window_size_left"], window["window_size_right"])
        self.handed_over.append((max_q, dropout, *options))
        out = torch.empty_like(q).copy_(self.attend(q, k, v, cu_q, max_q, *options))
        lse = torch.zeros(q.shape[1], q.shape[0])
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        self, grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale, **window
    ):
        self.calls["backward"] += 1
        options = (causal, scale, window["window_size_left"], window["window_size_right"])
        assert grad.is_contiguous()
        assert lse.shape == (q.shape[1], q.shape[0])
        assert rng_state.dtype == unused.dtype == torch.uint64
        assert self.handed_over[-1] == (max_q, dropout, *options)

        def differentiate() -> tuple[torch.Tensor, ...]:
            leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(self.attend(*leaves, cu_q, max_q, *options), leaves, grad.float())

        with ThreadPoolExecutor(1) as fresh:  # within an operator autograd is switched off, for this thread only
            gradients = fresh.submit(differentiate).result()
        return tuple(torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), gradients, strict=True))


@pytest.fixture
def stand_in():
    """Serves the CPU for one test: ours are registered for CUDA only, and PyTorch's exist there only."""
    kernels, ours, pytorchs = StandIn(), torch.library.Library("fastft", "IMPL"), torch.library.Library("aten", "IMPL")
    ours.impl("flash_attn_varlen_forward", fa2._forward, "CPU")
    ours.impl("flash_attn_varlen_backward", fa2._backward, "CPU")
    pytorchs.impl("_flash_attention_forward", kernels.forward, "CPU")
    pytorchs.impl("_flash_attention_backward", kernels.backward, "CPU")
    yield kernels
    ours._destroy()
    pytorchs._destroy()


def run(case: Case, **changes) -> dict[str, torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    options = {
        "softmax_scale": case.softmax_scale or case.q.shape[2] ** -0.5, "causal": case.causal,
        "window_size": case.window_size, "dropout": 0.0, **changes,
    }  # fmt: skip
    out = varlen_attention_fa2(q, k, v, case.packed, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), case.grad)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


# ------------------------------------------------------------------------------------------------ what is handed over


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [20, 64, 72, 80])
@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed", "odd"])
def test_any_layout_and_head_dimension(stand_in, causal, head_dim, layout):
    case = make_case((19, 5, 40), head_dim=head_dim, layout=layout, causal=causal, dtype=torch.bfloat16)
    case.assert_within_budget("fa2", run(case))
    assert stand_in.calls == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_size", [(0, 0), (3, None), (None, 2), (3, 2), (38, 38), (10**12, None)])
def test_any_window(stand_in, window_size, causal):
    case = make_case((40, 3, 1, 17), window_size=window_size, causal=causal, dtype=torch.bfloat16)
    case.assert_within_budget("fa2", run(case))


@pytest.mark.parametrize(
    ("window_size", "causal", "expected"),
    [
        ((None, None), True, (True, -1, 0)),  # the fastest kernel, and just as torch.nn.attention.varlen asks for it
        ((None, None), False, (False, -1, -1)),
        ((39, None), True, (True, -1, 0)),  # reaches past the longest document
        ((38, None), True, (False, 38, 0)),
        ((38, 7), True, (False, 38, 0)),
        ((38, 7), False, (False, 38, 7)),
        ((None, 7), False, (False, -1, 7)),
        ((0, 0), True, (False, 0, 0)),
    ],
)
def test_window_and_causal_flag(stand_in, window_size, causal, expected):
    run(make_case((40, 3), window_size=window_size, causal=causal, dtype=torch.bfloat16, softmax_scale=0.5))
    assert stand_in.handed_over == [(40, 0.0, expected[0], 0.5, *expected[1:])]


def test_fused_projections_are_read_in_place_and_odd_ones_copied(stand_in, monkeypatch):
    copies = []
    original = fa2._aligned
    monkeypatch.setattr(fa2, "_aligned", lambda x: copies.append(original(x) is not x) or original(x))
    for layout, copied in {"fused": False, "transposed": False, "odd": True}.items():
        run(make_case((19, 5), head_dim=64, layout=layout, dtype=torch.bfloat16))
        assert copies == [copied] * 3 + [False] + [copied] * 3, layout  # q, k, v; then the gradient, q, k, v
        copies.clear()


def test_no_tokens_never_reach_the_kernel(stand_in):
    run(make_case((), dtype=torch.bfloat16))
    assert not stand_in.calls


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1)])
def test_one_token_documents_avoid_the_decoding_shortcut(stand_in, lengths):
    case = make_case(lengths, heads=6, key_heads=2, dtype=torch.bfloat16)
    case.assert_within_budget("fa2", run(case))
    assert stand_in.handed_over[0][0] == 2


def test_expanded_gradient(stand_in):
    case = make_case((19, 5), dtype=torch.bfloat16)
    case = replace(case, grad=torch.ones((), dtype=torch.bfloat16).expand(case.q.shape))
    case.assert_within_budget("fa2", run(case))


def test_a_gradient_that_starts_anywhere_is_copied(stand_in, monkeypatch):
    case = make_case((19, 5), head_dim=64, dtype=torch.bfloat16)
    anywhere = torch.empty(case.grad.numel() + 1, dtype=torch.bfloat16)[1:].view_as(case.grad).copy_(case.grad)
    copies = []
    original = fa2._aligned
    monkeypatch.setattr(fa2, "_aligned", lambda x: copies.append(original(x) is not x) or original(x))
    case = replace(case, grad=anywhere)
    case.assert_within_budget("fa2", run(case))
    assert copies == [False] * 3 + [True] + [False] * 3


# ------------------------------------------------------------------------------------------------ tracing


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("layout", ["contiguous", "fused"])
def test_fake_tensors(head_dim, layout):
    with FakeTensorMode(allow_non_fake_inputs=True):
        case = make_case((19, 5, 40), head_dim=head_dim, layout=layout, dtype=torch.bfloat16)
        got = run(case)
    for name, like in {"out": case.q, "dq": case.q, "dk": case.k, "dv": case.v}.items():
        assert (got[name].shape, got[name].dtype, got[name].device) == (like.shape, like.dtype, like.device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed", "odd"])
def test_fake_kernels_describe_the_real_ones(layout):
    case = make_case((19, 5, 40), head_dim=64, layout=layout, dtype=torch.bfloat16, device="cuda")
    operators, tensors, options = torch.ops.fastft, (case.q, case.k, case.v), (0.125, -1, 0)
    forward = (*tensors, case.packed.cu_seqlens, 40, 0.0, True, *options)
    out, lse, rng_state, unused = operators.flash_attn_varlen_forward(*forward)
    backward = (case.grad, *tensors, out, lse, case.packed.cu_seqlens, 40, 0.0, True, rng_state, unused, *options)
    torch.library.opcheck(operators.flash_attn_varlen_forward, forward, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(operators.flash_attn_varlen_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_compiled_without_a_graph_break(stand_in):
    case = make_case((19, 5, 40), dtype=torch.bfloat16, window_size=(9, None))
    call = partial(varlen_attention_fa2, softmax_scale=0.2, causal=True, window_size=case.window_size, dropout=0.0)
    compiled = torch.compile(lambda q, k, v: call(q, k, v, case.packed), backend="aot_eager", fullgraph=True)
    results = []
    for function in (lambda q, k, v: call(q, k, v, case.packed), compiled):
        q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
        out = function(q, k, v)
        results.append((out, *torch.autograd.grad(out, (q, k, v), case.grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------ checkpointing


def selective(stored: Counter[str]):
    """A policy like TRL's: attention outputs are kept by their operator's name, everything else is recomputed."""

    def policy(ctx, function, *args, **kwargs):
        keep = "flash_attn" in str(function)
        stored[str(function)] += keep and not ctx.is_recompute
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def attend_twice_scaled(case: Case, q, k, v):
    options = {"softmax_scale": 0.2, "causal": True, "window_size": (9, None), "dropout": 0.0}
    return varlen_attention_fa2(q * 1.5, k, v, case.packed, **options) * 2


def gradients_of(function, case: Case, **options) -> tuple[torch.Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    out = checkpoint(function, case, q, k, v, use_reentrant=False, **options) if options else function(case, q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), case.grad)


def test_selective_checkpointing_keeps_the_output(stand_in):
    case, stored = make_case((19, 5, 40), dtype=torch.bfloat16), Counter()
    plain = gradients_of(attend_twice_scaled, case)
    stand_in.calls.clear()
    saved = gradients_of(attend_twice_scaled, case, context_fn=selective(stored))
    assert stand_in.calls == {"forward": 1, "backward": 1}
    assert stored["fastft.flash_attn_varlen_forward.default"] == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))
    stand_in.calls.clear()
    gradients_of(attend_twice_scaled, case, preserve_rng_state=True)  # plain checkpointing, for contrast
    assert stand_in.calls == {"forward": 2, "backward": 1}


@pytest.mark.gpu
def test_selective_checkpointing_keeps_the_output_on_a_gpu():
    case, stored = make_case((19, 5, 40), dtype=torch.bfloat16, device="cuda"), Counter()
    plain = gradients_of(attend_twice_scaled, case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        saved = gradients_of(attend_twice_scaled, case, context_fn=selective(stored))
    ran = {event.key: event.count for event in profile.key_averages()}
    assert ran["aten::_flash_attention_forward"] == ran["aten::_flash_attention_backward"] == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_checkpointing_repeats_the_dropout(dtype):
    case = make_case((19, 5, 40), dtype=dtype, device="cuda", head_dim=64)

    def dropped(case, q, k, v):
        return varlen_attention_fa2(
            q, k, v, case.packed, softmax_scale=0.2, causal=True, window_size=(None, None), dropout=0.3
        )

    torch.manual_seed(3)
    plain = gradients_of(dropped, case)
    torch.manual_seed(3)
    recomputed = gradients_of(dropped, case, preserve_rng_state=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("window_size", [(None, None), (100, None)])
def test_boundaries_are_never_forgotten_on_long_documents(window_size):
    lengths = (1000, 1, 517, 128, 129, 273)
    case = make_case(lengths, dtype=torch.bfloat16, device="cuda", head_dim=128, window_size=window_size)
    case.assert_within_budget("fa2", case.run("fa2"))
    case.assert_mutant_caught("fa2", case.run("fa2", PackedSequences.from_lengths([2048], "cuda")))
