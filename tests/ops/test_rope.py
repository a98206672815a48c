"""RoPE: the reference against Hugging Face, the kernel against both, layouts, positions, index width, messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from rope_cases import Case, hf_rope, make_case

from fastft.capability import GPUCapability, probe
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.rope import rope_qk, verdicts
from fastft.ops.rope.launch import plan_launch, rotate
from fastft.ops.rope.reference import rope_qk_reference
from fastft.ops.rope.triton import choose_tile, compile_cases

DTYPES = [pytest.param(dtype, id=str(dtype).split(".")[1]) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
LAYOUTS = ["half", "interleaved"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


def check(case: Case) -> None:
    eager, oracle = case.eager(), case.oracle()
    assert_within_budget(case.triton(), eager, oracle)
    assert_within_budget(case.triton_in_place(), eager, oracle)


# ------------------------------------------------------------------------------------------------ reference


def hf_doubled(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((angles, angles), dim=-1)


def test_reference_is_bitwise_llama():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = make_case((2, 7), 4, 2, 32)
    expected = apply_rotary_pos_emb(case.q, case.k, hf_doubled(case.cos), hf_doubled(case.sin), unsqueeze_dim=2)
    got = rope_qk_reference(case.q, case.k, case.cos, case.sin)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_reference_is_bitwise_glm_interleaved_and_partial():
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    case = make_case((2, 7), 4, 2, 32, rotary=16, layout="interleaved")
    expected = apply_rotary_pos_emb(case.q, case.k, hf_doubled(case.cos), hf_doubled(case.sin), unsqueeze_dim=2)
    got = rope_qk_reference(case.q, case.k, case.cos, case.sin, layout="interleaved")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_bitwise_cohere(dtype):
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

    case = make_case((2, 7), 4, 2, 32, layout="interleaved", dtype=dtype)
    cos, sin = case.cos.repeat_interleave(2, dim=-1), case.sin.repeat_interleave(2, dim=-1)
    expected = apply_rotary_pos_emb(case.q, case.k, cos, sin, unsqueeze_dim=2)
    got = rope_qk_reference(case.q, case.k, cos[..., ::2], sin[..., ::2], layout="interleaved")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_bitwise_the_reference(device, dtype, layout):
    case = make_case((7,), 3, 2, 24, rotary=20, layout=layout, dtype=dtype, device=device)
    expected = rope_qk_reference(case.q, case.k, case.cos, case.sin, layout=layout)
    got = rope_qk(case.q, case.k, case.cos, case.sin, layout=layout, impl="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ------------------------------------------------------------------------------------------------ error budget


@pytest.mark.parametrize("rotary", [None, 12], ids=["full", "partial"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_within_budget(device, dtype, layout, rotary, poisoned_empty):
    check(make_case((11,), 5, 2, 16, rotary, dtype=dtype, layout=layout, device=device))


@pytest.mark.parametrize("tokens", [(0,), (1,), (2,), (13,), (0, 4), (3, 0), (1, 1), (4, 1), (1, 7), (3, 5)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_tokens(device, tokens, layout, poisoned_empty):
    check(make_case(tokens, 3, 1, 16, 12, layout=layout, device=device))


@pytest.mark.parametrize(
    ("num_q_heads", "num_k_heads", "head_dim", "rotary"),
    [
        (14, 2, 64, None), (3, 1, 65, 64), (5, 5, 80, 32), (2, 2, 96, None), (7, 1, 112, None), (12, 4, 128, None),
        (2, 1, 192, 64), (2, 1, 192, None), (64, 64, 64, None), (64, 64, 256, None), (1, 9, 8, 2), (1, 1, 2, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_and_head_dims(device, num_q_heads, num_k_heads, head_dim, rotary, layout, poisoned_empty):
    check(make_case((3,), num_q_heads, num_k_heads, head_dim, rotary, layout=layout, device=device))


def test_tile_stays_within_its_budget():
    for heads in (1, 2, 7, 8, 28, 32, 40, 64, 128):
        for half in (1, 16, 20, 32, 40, 64, 96, 128, 256):
            tile = choose_tile(heads, 8, half)
            for block in tile[:3]:
                assert block & (block - 1) == 0
            padded_half = 1 << (half - 1).bit_length()
            assert tile.block_t * max(tile.block_hq, tile.block_hk) * padded_half <= 2048
    assert choose_tile(40, 8, 64).block_hq == 8  # 5 full tiles, where 32 would leave 24 of 64 rows empty


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mutants_are_caught(device, layout):
    case = make_case((11,), 3, 2, 16, layout=layout, dtype=torch.bfloat16, device=device)
    eager, oracle = case.eager(), case.oracle()
    assert_mutant_caught(replace(case, sin=-case.sin).triton(), eager, oracle)
    late = case.cos.clone(), case.sin.clone()
    for angles, source in zip(late, (case.cos, case.sin), strict=True):
        angles[6] = source[7]  # the first token of a second document starts one position late
    assert_mutant_caught(replace(case, cos=late[0], sin=late[1]).triton(), eager, oracle)
    other = "interleaved" if layout == "half" else "half"
    assert_mutant_caught(replace(case, layout=other).triton(), eager, oracle)
    gradient_not_inverted = {**case.triton(), "dq": replace(case, q=case.dq).triton()["q"]}
    assert_mutant_caught(gradient_not_inverted, eager, oracle)


# ------------------------------------------------------------------------------------------------ memory layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_a_fused_projection(device, layout, poisoned_empty):
    case = make_case((7,), 4, 2, 16, layout=layout, device=device)
    fused = torch.randn(7, 8 * 16, device=device)
    q, k = fused[:, :64].unflatten(-1, (4, 16)), fused[:, 64:96].unflatten(-1, (2, 16))
    check(replace(case, q=q, k=k))


@pytest.mark.parametrize("tokens", [(2, 5), (3, 3), (1, 4)], ids=str)
def test_transposed_heads_and_tokens(device, tokens, poisoned_empty):
    """[B, H, L, D] memory seen as [B, L, H, D]; with H == L a guess from shapes or strides would be wrong."""
    batch, length = tokens
    case = make_case(tokens, length, 2, 16, device=device)
    q = torch.randn(batch, length, length, 16, device=device).transpose(1, 2)
    k = torch.randn(batch, 2, length, 16, device=device).transpose(1, 2)
    dq = torch.randn(batch, length, length, 16, device=device).transpose(1, 2)
    check(replace(case, q=q, k=k, dq=dq))


def test_strided_within_a_head(device, poisoned_empty):
    case = make_case((5,), 3, 2, 16, device=device)
    q, dk = torch.randn(5, 3, 32, device=device)[..., ::2], torch.randn(16, 2, 5, device=device).permute(2, 1, 0)
    check(replace(case, q=q, dk=dk))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [(5,), (2, 5)], ids=str)
def test_heads_not_yet_split_off(device, tokens, layout, poisoned_empty):
    case = make_case(tokens, 3, 2, 16, 12, layout=layout, device=device)
    flat = {name: getattr(case, name).flatten(-2) for name in ("q", "k", "dq", "dk")}
    check(replace(case, **flat, options={"head_dim": 16}))
    sliced = torch.randn(*tokens, 3 * 16 + 5, device=device)[..., 5:]
    check(replace(case, **{**flat, "q": sliced}, options={"head_dim": 16}))


@pytest.mark.parametrize("angle_dims", [(5,), (1, 5), (3, 5), (3, 1), (1, 1)], ids=str)
def test_angles_broadcast_against_the_tokens(device, angle_dims, poisoned_empty):
    check(make_case((3, 5), 3, 2, 16, angle_dims=angle_dims, device=device))


def test_packed_tokens_take_angles_with_a_batch_of_one(device):
    check(make_case((5,), 3, 2, 16, angle_dims=(1, 5), device=device))


def test_every_row_of_a_batch_has_its_own_angles(device):
    case = make_case((3, 5), 3, 2, 16, device=device)
    whole = case.triton()
    for row in range(3):
        alone = {name: getattr(case, name)[row] for name in ("q", "k", "cos", "sin", "dq", "dk")}
        for name, value in replace(case, **alone).triton().items():
            assert torch.equal(value, whole[name][row]), name


@pytest.mark.parametrize(("step", "halve"), [(2, False), (1, True)], ids=["every second", "first half"])
def test_angles_as_hugging_face_slices_them(device, step, halve):
    case = make_case((7,), 3, 2, 16, device=device)
    wide_cos, wide_sin = (torch.rand(7, 16, device=device) for _ in range(2))
    cut = (lambda x: x[..., :8]) if halve else (lambda x: x[..., ::step])
    check(replace(case, cos=cut(wide_cos), sin=cut(wide_sin)))


def test_cos_and_sin_of_different_strides_and_dtypes(device):
    case = make_case((7,), 3, 2, 16, device=device)
    sin = torch.rand(8, 7, device=device).t()
    check(replace(case, sin=sin))
    rotated = rope_qk(case.q, case.k, case.cos.bfloat16(), sin, impl="triton")
    expected = rope_qk_reference(case.q, case.k, case.cos.bfloat16(), sin)
    assert all(torch.equal(a, b) for a, b in zip(rotated, expected, strict=True))


# ------------------------------------------------------------------------------------------------ positions


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize(
    ("tokens", "position_dims"), [((7,), (7,)), ((7,), (1, 7)), ((3, 4), (3, 4)), ((3, 4), (1, 4))], ids=str
)
def test_positions_are_gathered(device, tokens, position_dims, dtype, impl):
    case = make_case(tokens, 3, 2, 16, 12, device=device)
    table = torch.rand(11, 12, device=device)
    cos, sin = table[:, ::2], table[:, 1::2]
    positions = torch.randint(0, 11, position_dims, device=device)
    positions.view(-1)[:2] = torch.tensor([10, 0], device=device)
    gathered = replace(case, cos=cos[positions], sin=sin[positions])
    options = {"position_ids": positions.to(dtype), "impl": impl}
    got = replace(case, cos=cos, sin=sin, options=options).run(rope_qk)
    for name, expected in gathered.triton().items():
        assert torch.equal(got[name], expected), name


def test_positions_outside_the_table_give_nan_and_read_nothing(device):
    case = make_case((5,), 3, 2, 16, device=device)
    positions = torch.tensor([0, 5, -1, 4, 2**40], device=device)
    args = ([case.q, case.k], case.cos, case.sin, positions)
    q, k = rotate(*args, head_dim=None, interleaved=False)
    outside = torch.tensor([False, True, True, False, True], device=device)
    for x in (q, k):
        assert torch.isnan(x[outside]).all() and not torch.isnan(x[~outside]).any()


@pytest.mark.parametrize("position", [-1, 5])
def test_positions_outside_the_table_raise_on_a_cpu(position):
    case = make_case((3,), 3, 2, 16)
    table = torch.rand(5, 8)
    with pytest.raises(KernelInputError, match="the table has 5 rows"):
        rope_qk(case.q, case.k, table, table, position_ids=torch.tensor([0, position, 1]))


# ------------------------------------------------------------------------------------------------ index width


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gather", [False, True], ids=["angles", "table"])
def test_long_indexing_gives_the_same_numbers(device, layout, gather):
    case = make_case((3, 5), 3, 2, 16, 12, layout=layout, device=device)
    cos, sin = (case.cos[0], case.sin[0]) if gather else (case.cos, case.sin)
    positions = torch.randint(0, 5, (3, 5), device=device) if gather else None
    short, long = (
        rotate([case.q, case.k], cos, sin, positions, head_dim=None, interleaved=layout != "half", long_indexing=long)
        for long in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


LIMIT = 2**31 - 1
PLAIN_Q = ((4, 3, 16), (48, 16, 1))
PLAIN_K = ((4, 2, 16), (32, 16, 1))
PLAIN_ANGLES = ((4, 8), (8, 1))


def is_long(q=PLAIN_Q, k=PLAIN_K, angles=PLAIN_ANGLES, positions=None) -> bool:
    plan = plan_launch((q, k), angles, positions, head_dim=None, interleaved=False, inverse=False, in_place=True)
    return plan.constexprs["LONG_INDEXING"]


def test_short_contexts_stay_in_int32():
    assert not is_long()


@pytest.mark.parametrize("excess", [0, 1], ids=["at the limit", "past it"])
def test_index_width_follows_the_strided_reach(excess):
    """The last element of exactly one tensor lies at offset 2**31 - 1, or one past it."""
    past = bool(excess)
    rest = 2 * 16 + 15  # within a token of q
    # The stride of one axis is what remains of the offset; sizes are chosen so that it divides.
    token = ((2, 3, 16), (LIMIT + excess - rest, 16, 1))
    head = ((4, 2, 16), (16, LIMIT + excess - 3 * 16 - 15, 1))
    dim = ((4, 2, 2), (2, 1, LIMIT + excess - 3 * 2 - 1))
    batch = ((2, 4, 2, 16), (LIMIT + excess - 3 * 32 - 16 - 15, 32, 16, 1))
    assert is_long(q=token, k=((2, 2, 16), (32, 16, 1))) is past
    assert is_long(k=head) is past
    assert is_long(q=((4, 3, 2), (6, 2, 1)), k=dim, angles=((4, 1), (1, 1))) is past
    assert is_long(q=batch, k=((2, 4, 2, 16), (128, 32, 16, 1)), angles=((1, 4, 8), (32, 8, 1))) is past
    assert is_long(angles=((4, 8), (8, (LIMIT + excess - 24) // 7 + excess))) is past
    assert is_long(angles=((2, 8), (LIMIT + excess - 7, 1)), positions=((4,), (1,))) is past
    assert is_long(angles=((9, 8), (8, 1)), positions=((2,), (LIMIT + excess,)), q=((2, 3, 16), PLAIN_Q[1]),
                   k=((2, 2, 16), PLAIN_K[1])) is past  # fmt: skip


def test_index_width_follows_the_outputs():
    """q may be expanded from few elements of memory while its rotated copy is huge."""
    for tokens, expected in ((2**16, False), (2**16 + 1, True)):  # 2**16 tokens end at offset 2**31 - 1
        expanded = ((tokens, 16, 2**11), (0, 0, 1))
        assert is_long(q=expanded, k=((tokens, 2, 2**11), (0, 0, 1)), angles=((tokens, 8), (8, 1))) is expected


def test_contiguous_batches_fold_into_one_axis():
    plan = plan_launch(
        (((3, 5, 2, 16), (160, 32, 16, 1)),), ((3, 5, 8), (40, 8, 1)), None,
        head_dim=None, interleaved=False, inverse=False, in_place=False,
    )  # fmt: skip
    assert plan.integers[0] == 15


# ------------------------------------------------------------------------------------------------ messages


def rope_error(match: str, error: type[Exception] = KernelInputError, **changes) -> None:
    case = make_case((5,), 3, 2, 16)
    args = {name: getattr(case, name) for name in ("q", "k", "cos", "sin")}
    with pytest.raises(error, match=match):
        rope_qk(**{**args, **changes})


def test_messages_say_what_does_not_fit():
    rope_error("are for 4 tokens .* q and k have 5", cos=torch.rand(4, 8), sin=torch.rand(4, 8))
    rope_error("q has tokens .5,. and k .4,.", k=torch.rand(4, 2, 16))
    rope_error("q has head_dim 16 and k 12", k=torch.rand(5, 2, 12))
    rope_error("cos has shape .* sin", sin=torch.rand(5, 4))
    rope_error("does not divide the 48 features", q=torch.rand(5, 48), k=torch.rand(5, 32), head_dim=10)
    rope_error("without head_dim it must be", q=torch.rand(5, 48))
    rope_error("with head_dim it must be", q=torch.rand(1, 5, 3, 16), head_dim=16)
    rope_error("position_ids are for 6 tokens", position_ids=torch.zeros(6, dtype=torch.int64))
    rope_error("int64 or int32", position_ids=torch.zeros(5))
    rope_error("must be tables", position_ids=torch.zeros(5, dtype=torch.int64), cos=torch.rand(1, 5, 8),
               sin=torch.rand(1, 5, 8))  # fmt: skip
    rope_error("not a scalar", position_ids=torch.tensor(0))
    rope_error("q is torch.int64", q=torch.ones(5, 3, 16, dtype=torch.int64))
    rope_error("cos.detach", cos=torch.rand(5, 8, requires_grad=True))
    rope_error("unknown layout", UnsupportedOptionError, layout="neox")
    rope_error("unknown implementation", UnsupportedOptionError, impl="cuda")


def test_a_rotary_width_that_cannot_be_halved_is_named():
    full = torch.rand(5, 16)  # what Hugging Face hands out: both halves
    rope_error("which rotate 32 elements, and head_dim is 16", cos=full, sin=full)
    odd = torch.rand(5, 8)
    rope_error("which rotate 16 elements, and head_dim is 15", q=torch.rand(5, 3, 15), k=torch.rand(5, 2, 15),
               cos=odd, sin=odd)  # fmt: skip
    rope_error("gives 0 angles", cos=torch.rand(5, 0), sin=torch.rand(5, 0))


def test_devices_must_agree():
    rope_error("q is on cpu and k on meta", k=torch.rand(5, 2, 16, device="meta"))
    rope_error("q is on cpu and position_ids on meta", position_ids=torch.zeros(5, dtype=torch.int64, device="meta"))


# ------------------------------------------------------------------------------------------------ choice


def test_auto_takes_the_reference_on_a_cpu():
    assert list(verdicts(probe("cpu"), torch.bfloat16)) == ["reference", "triton"]


def test_fp64_stays_fp64():
    case = make_case((5,), 3, 2, 16, dtype=torch.float64)
    q, _ = rope_qk(case.q, case.k, case.cos, case.sin)
    assert q.dtype == torch.float64
    assert torch.equal(q, hf_rope(case.q, case.cos, case.sin, "half"))
    rope_error("too narrow for float64", UnsupportedOptionError, q=case.q, k=case.k, impl="triton")


def test_auto_prefers_the_kernel_on_a_gpu():
    hopper = replace(probe("cpu"), device=replace(probe("cpu").device, kind="cuda", arch=(9, 0)))
    assert isinstance(hopper, GPUCapability)
    assert next(iter(verdicts(hopper, torch.bfloat16))) == "triton"
    assert not verdicts(hopper, torch.bfloat16, torch.float64)["triton"]


def test_compiles_as_one_graph():
    case = make_case((5,), 3, 2, 16)
    compiled = torch.compile(rope_qk, fullgraph=True, backend="aot_eager")
    expected = rope_qk(case.q, case.k, case.cos, case.sin)
    for got, want in zip(compiled(case.q, case.k, case.cos, case.sin), expected, strict=True):
        assert torch.equal(got, want)


def test_compile_cases_name_every_argument():
    for case in compile_cases():
        assert list(case.signature) == list(case.kernel.arg_names)
        assert {name for name, kind in case.signature.items() if kind == "constexpr"} == set(case.constexprs)
