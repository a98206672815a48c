"""QK-norm and RoPE in one kernel: an fp64 oracle, the Hugging Face formulas, and any layout in memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from qk_norm_rope_cases import (
    DTYPES,
    LAYOUTS,
    ROUNDINGS,
    check,
    kernel,
    make,
    reference,
)

from fastft.ops.qk_norm_rope import qk_norm_rope
from fastft.ops.qk_norm_rope.launch import Side, launch_backward, launch_forward, plan_backward, plan_forward
from fastft.ops.qk_norm_rope.specialise import BACKWARD, FORWARD, Heads, Kind, specialise
from fastft.ops.rms_norm import rms_norm
from fastft.ops.rope import rope_qk


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


# ------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize(
    ("family", "name", "rounding", "whole_width"),
    [
        ("qwen3", "Qwen3RMSNorm", "llama", False),
        ("olmo2", "Olmo2RMSNorm", "fp32_weight", True),
        ("gemma3", "Gemma3RMSNorm", "gemma", False),
    ],
)
def test_reference_is_bitwise_hugging_face_in_fp32(family, name, rounding, whole_width, device):
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    case = make((2, 5), device=device, rounding=rounding, whole_width=whole_width)

    def norm(x, weight):
        module = getattr(modeling, name)(weight.shape[0], eps=1e-6).to(device)
        module.weight = torch.nn.Parameter(weight)
        return module(x.flatten(-2) if whole_width else x).view(x.shape).transpose(1, 2)

    doubled = [torch.cat((table, table), dim=-1) for table in (case.cos, case.sin)]
    expected = modeling.apply_rotary_pos_emb(norm(case.q, case.q_weight), norm(case.k, case.k_weight), *doubled)
    found = reference(case.q, case.k, case.q_weight, case.k_weight, case.cos, case.sin, **case.options)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_reference_is_bitwise_the_two_ops(rounding, layout, whole_width):
    case = make((2, 5), 3, 2, 20, 12, dtype=torch.bfloat16, rounding=rounding, layout=layout, whole_width=whole_width)

    def two_ops(q, k, q_weight, k_weight, cos, sin, eps, rounding, layout, whole_width):
        q, k = (
            rms_norm(x.flatten(2) if whole_width else x, w, eps, rounding=rounding, impl="reference").view(x.shape)
            for x, w in ((q, q_weight), (k, k_weight))
        )
        return rope_qk(q, k, cos, sin, layout=layout, impl="reference")

    found, expected = case.run(reference), case.run(two_ops)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------ error budget


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_within_budget(device, dtype, rounding, layout, whole_width, poisoned_empty):
    check(make((6,), 3, 2, 32, 20, dtype=dtype, device=device, rounding=rounding, layout=layout,
               whole_width=whole_width))  # fmt: skip


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
@pytest.mark.parametrize(
    ("num_q_heads", "num_k_heads", "head_dim", "rotary"),
    [
        (4, 1, 64, None), (5, 2, 128, None), (2, 2, 80, None), (3, 1, 96, 2), (3, 2, 65, 64), (1, 7, 24, 8),
        (1, 1, 256, 64), (36, 4, 128, None), (48, 48, 8, None), (1, 1, 2, 2),
    ],
)  # fmt: skip
def test_heads_and_head_dims(device, num_q_heads, num_k_heads, head_dim, rotary, whole_width, poisoned_empty):
    # A head of two is (+-a, +-b) with a^2 + b^2 = 2: its dx cancels unless eps holds against it.
    eps = 1.0 if head_dim == 2 else 1e-6
    tokens = (64,) if head_dim == 2 else (3,)
    check(make(tokens, num_q_heads, num_k_heads, head_dim, rotary, eps=eps, device=device, dtype=torch.bfloat16,
               whole_width=whole_width))  # fmt: skip


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
@pytest.mark.parametrize("tokens", [(1,), (1, 1), (1, 7), (7, 1), (3, 5), (41,)], ids=str)
def test_any_number_of_tokens(device, tokens, whole_width, poisoned_empty):
    check(make(tokens, 4, 2, 32, 24, device=device, whole_width=whole_width))


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("tokens", [(0,), (0, 4), (3, 0)], ids=str)
def test_no_tokens(device, tokens, impl):
    case = make((4,), device=device)
    empty = [torch.zeros(*tokens, heads, 32, device=device) for heads in (4, 2)]
    angles = torch.zeros(*tokens, 16, device=device)
    case = replace(case, q=empty[0], k=empty[1], cos=angles, sin=angles, dq_out=empty[0], dk_out=empty[1])
    found = case.run(lambda *args, **options: qk_norm_rope(*args, impl=impl, **options))
    assert found["q_out"].shape == found["dq"].shape == empty[0].shape
    assert torch.equal(found["dk_weight"], torch.zeros_like(case.k_weight))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str
)
def test_weights_of_another_dtype(device, dtype, weight_dtype, rounding, poisoned_empty):
    """Under llama the results have the dtype that torch promotes to."""
    check(make(dtype=dtype, weight_dtype=weight_dtype, rounding=rounding, device=device))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_x_hat_is_rounded_where_the_modules_round_it(device, rounding):
    """Without a rotation the numbers are those of the norm; one of another order differs in a quarter of them."""
    case = make((9,), dtype=torch.bfloat16, device=device, rounding=rounding)
    still = replace(case, cos=torch.ones_like(case.cos), sin=torch.zeros_like(case.sin))
    found, expected = still.triton()["q_out"], still.eager()["q_out"]
    assert (found == expected).float().mean() > 0.99
    if rounding != "gemma":
        other = still.options | {"rounding": "llama" if rounding == "fp32_weight" else "fp32_weight"}
        assert (found == replace(still, options=other).eager()["q_out"]).float().mean() < 0.9


@pytest.mark.parametrize("scale", [1e-3, 6e4])
def test_small_and_large_numbers(device, scale):
    case = make(dtype=torch.float16, device=device)
    check(replace(case, q=(case.q.float().sign() * scale).half(), k=(case.k.float().sign() * scale).half()))


# ------------------------------------------------------------------------------------------------ mutants


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mutants_are_caught(device, layout):
    case = make(dtype=torch.bfloat16, device=device, layout=layout)
    found, eager, oracle = case.triton(), case.eager(), case.oracle()
    assert_within_budget(found, eager, oracle)
    late = case.cos.clone()
    late[3] = case.cos[4]
    other = "interleaved" if layout == "half" else "half"
    not_turned_back = case.triton(sin=-case.sin)["dq"]
    for mutant in (
        case.triton(sin=-case.sin),
        case.triton(cos=late),
        case.triton(options=case.options | {"layout": other}),
        case.triton(options=case.options | {"rounding": "gemma"}),
        case.triton(q_weight=case.k_weight),
        found | {"dq": not_turned_back},
        found | {"dq_weight": found["dk_weight"]},
        found | {"dk": found["dk"] * 1.02},
    ):
        assert_mutant_caught(mutant, eager, oracle)


def test_a_token_missing_in_the_weights_gradient_is_caught(device):
    case = make((41,), dtype=torch.bfloat16, device=device)
    cut = {name: getattr(case, name)[:-1] for name in ("q", "k", "cos", "sin", "dq_out", "dk_out")}
    missing = case.triton(**cut)["dq_weight"]
    assert_mutant_caught(case.triton() | {"dq_weight": missing}, case.eager(), case.oracle())


def test_heads_normalised_apart_are_caught(device):
    case = make(device=device, whole_width=True)
    same = {"q_weight": case.q_weight[:32].repeat(4), "k_weight": case.k_weight[:32].repeat(2)}
    whole = replace(case, **same)
    apart = replace(case, q_weight=same["q_weight"][:32], k_weight=same["k_weight"][:32], options={"eps": 1e-6})
    outputs = [{name: value for name, value in found.items() if name in ("q_out", "k_out", "dq", "dk")}
               for found in (apart.triton(), whole.eager(), whole.oracle())]  # fmt: skip
    assert_mutant_caught(*outputs)


def test_dropped_eps_is_caught(device):
    case = make(device=device, eps=1e-2)
    assert_mutant_caught(case.triton(options={"eps": 1e-6}), case.eager(), case.oracle())


# ------------------------------------------------------------------------------------------------ memory layouts


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
def test_slices_of_a_fused_projection_and_the_angles_of_hugging_face(device, whole_width, poisoned_empty):
    case = make((2, 5), device=device, angle_dims=(1, 5), whole_width=whole_width)
    fused = torch.randn(2, 5, 8 * 32 + 3, device=device)
    doubled = [torch.cat((table, table), dim=-1)[..., :16] for table in (case.cos, case.sin)]
    upstream = {"dq_out": case.dq_out.flatten(2), "dk_out": case.dk_out.flatten(2)}
    check(replace(case, q=fused[..., :128], k=fused[..., 128:192], cos=doubled[0], sin=doubled[1], **upstream,
                  options=case.options | {"head_dim": 32}))  # fmt: skip


LAYOUTS_OF_HEADS = {
    "heads first": lambda: torch.randn(2, 4, 5, 32).transpose(1, 2),
    "every other element": lambda: torch.randn(2, 5, 4, 64)[..., ::2],
    "head dim first": lambda: torch.randn(32, 4, 2, 5).permute(2, 3, 1, 0),
    "expanded heads": lambda: torch.randn(2, 5, 1, 32).expand(2, 5, 4, 32),
    "expanded tokens": lambda: torch.randn(4, 32).expand(2, 5, 4, 32),
    "one value": lambda: torch.randn(()).expand(2, 5, 4, 32),
}


@pytest.mark.parametrize("layout", LAYOUTS_OF_HEADS)
@pytest.mark.parametrize("of", ["q", "dq_out"])
def test_any_strides_and_nothing_is_written(device, layout, of, poisoned_empty):
    case = replace(make((2, 5), device=device), **{of: LAYOUTS_OF_HEADS[layout]().to(device)})
    before = {name: value.clone() for name, value in case.tensors().items()}
    check(case)
    assert all(torch.equal(value, before[name]) for name, value in case.tensors().items())


@pytest.mark.parametrize("angle_dims", [(5,), (1, 5), (3, 5), (3, 1), (1, 1)], ids=str)
def test_angles_broadcast_against_the_tokens(device, angle_dims):
    check(make((3, 5), angle_dims=angle_dims, device=device))


def test_packed_tokens_take_angles_with_a_batch_of_one(device):
    check(make((5,), angle_dims=(1, 5), device=device))


def test_cos_and_sin_of_different_strides_and_strided_weights(device):
    case = make((7,), device=device)
    sin = torch.rand(16, 7, device=device).t()
    weight = torch.randn(32, 2, device=device)
    check(replace(case, sin=sin, q_weight=weight[:, 0], k_weight=weight[:, 1]))


def test_q_and_k_may_be_one_tensor(device):
    case = make((5,), 2, 2, device=device)
    x = case.q.requires_grad_()
    out = kernel(x, x, case.q_weight, case.k_weight, case.cos, case.sin, eps=1e-6)
    (found,) = torch.autograd.grad(out, x, (case.dq_out, case.dk_out))
    apart = replace(case, q=x.detach(), k=x.detach()).triton()
    assert torch.equal(found, apart["dq"] + apart["dk"])


# ------------------------------------------------------------------------------------------------ index width


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_indexing_gives_the_same_numbers(device, layout, whole_width):
    case = make((9,), 4, 2, 32, 20, device=device, whole_width=whole_width)
    kind = Kind("llama", whole_width, layout == "interleaved")
    batched = {name: getattr(case, name)[None] for name in ("q", "k", "cos", "sin", "dq_out", "dk_out")}
    weights = {"q_weight": case.q_weight, "k_weight": case.k_weight}
    inputs = {name: batched[name] for name in ("q", "k", "cos", "sin")} | weights

    def run(long_indexing):
        q, k, q_rstd, k_rstd = launch_forward(**inputs, head_dim=None, eps=1e-6, kind=kind, long_indexing=long_indexing)
        sides = (
            Side(batched["dq_out"], batched["q"], case.q_weight, q_rstd, True, True),
            Side(batched["dk_out"], batched["k"], case.k_weight, k_rstd, True, True),
        )
        of_q, of_k = launch_backward(*sides, batched["cos"], batched["sin"], None, kind, long_indexing=long_indexing)
        return (q, k, q_rstd, k_rstd, *of_q, *of_k)

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


LIMIT = 2**31 - 1
KIND = Kind("llama", False, False)
PLAIN = ((1, 2, 3, 16), (96, 48, 16, 1))
ANGLES = ((1, 2, 8), (16, 8, 1))


@pytest.mark.parametrize("excess", [0, 1], ids=["at the limit", "past it"])
def test_index_width_follows_the_strided_reach(excess):
    """The last element of one tensor lies at offset 2**31 - 1, or one past it."""
    far = ((1, 2, 3, 16), (0, LIMIT + excess - 2 * 16 - 15, 16, 1))
    far_angles = ((1, 2, 8), (0, LIMIT + excess - 7, 1))
    forward = [(far_angles, PLAIN, PLAIN), (ANGLES, far, PLAIN), (ANGLES, PLAIN, far)]
    assert [plan_forward(*case, KIND).constants["LONG_INDEXING"] for case in forward] == [bool(excess)] * 3
    for place in range(4):
        layouts = [far if at == place else PLAIN for at in range(4)]
        assert plan_backward(ANGLES, *layouts, KIND).constants["LONG_INDEXING"] is bool(excess)
    # 2**16 tokens of 2**15 elements, expanded from one, give results that end at offset 2**31 - 1.
    tokens = 2**16 + excess
    expanded, angles = ((1, tokens, 16, 2**11), (0, 0, 0, 1)), ((1, tokens, 8), (0, 0, 1))
    assert plan_forward(angles, expanded, PLAIN, KIND).constants["LONG_INDEXING"] is bool(excess)


@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
def test_programs_hold_powers_of_two_within_their_budget(whole_width):
    for heads, head_dim, rotary in itertools.product((1, 7, 40, 64), (64, 80, 96, 128, 256), (16, 64)):
        for budget in (FORWARD, BACKWARD):
            kind = KIND._replace(whole_width=whole_width)
            constants = specialise(Heads(heads, 8, head_dim, rotary // 2), kind, False, budget)
            sizes = [constants[name] for name in ("BLOCK_T", "BLOCK_HQ", "BLOCK_HK", "BLOCK_HALF", "num_warps")]
            assert all(size & (size - 1) == 0 for size in [*sizes, constants["BLOCK_TAIL"]])
            row = 2 * constants["BLOCK_HALF"] + constants["BLOCK_TAIL"]
            tile = constants["BLOCK_T"] * max(constants["BLOCK_HQ"], constants["BLOCK_HK"]) * row
            assert tile < 2 * budget.elements or (whole_width and constants["BLOCK_T"] == 1)


# ------------------------------------------------------------------------------------------------ GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("far", ["q", "dk_out"])
def test_reach_past_int32(far):
    """Tokens times stride beyond 2**31 elements; the last tokens are the ones that would wrap around."""
    case = make((70_000,), 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    memory = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device="cuda")[:, :128].unflatten(1, (2, 64))
    memory.copy_(getattr(case, far))
    torch.testing.assert_close(case.triton(**{far: memory}), case.triton())


@pytest.mark.gpu
@pytest.mark.parametrize("whole_width", [False, True], ids=["heads", "whole"])
@pytest.mark.parametrize("tokens", [8192, 8191])
def test_many_programs_sum_one_weight_gradient(tokens, whole_width):
    check(make((tokens,), 16, 8, 128, dtype=torch.bfloat16, device="cuda", whole_width=whole_width))
