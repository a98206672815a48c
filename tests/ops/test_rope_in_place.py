"""RoPE in place: who may write, who may not, and that the difference matters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from interpreter import run_kernels_as_a_gpu_would
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from rope_cases import make_case, record_launches
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fastft.errors import KernelInputError
from fastft.ops.rope import in_place_verdict, rope_qk, rope_qk_
from fastft.ops.rope.reference import rope_qk_reference


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


HEAD_DIM, Q_HEADS, K_HEADS, TOKENS, WIDTH = 8, 4, 2, 6, 12


@dataclass
class Rotation:
    """Which path the scenarios take, and what they did."""

    device: torch.device
    mode: str  # "eager", "verdict" or "forced"
    taken: list[str]
    refusals: list[str]

    def __call__(self, q, k, q_producer=None, k_producer=None):
        generator = torch.Generator().manual_seed(TOKENS)
        angles = torch.rand(TOKENS, HEAD_DIM // 2, generator=generator).mul(6).to(self.device)
        split = q.shape[-1] == HEAD_DIM
        options = {"head_dim": None if split else HEAD_DIM}
        if q.ndim - (2 if split else 1) == 2:
            angles = angles.view(2, TOKENS // 2, -1)
        cos, sin = angles.cos(), angles.sin()
        if self.mode == "eager":
            return rope_qk_reference(q, k, cos, sin, **options)
        verdicts = in_place_verdict(q, q_producer), in_place_verdict(k, k_producer)
        self.refusals += [verdict.reason for verdict in verdicts if not verdict]
        in_place = all(verdicts) or self.mode == "forced"
        self.taken.append("in place" if in_place else "out of place")
        return (rope_qk_ if in_place else rope_qk)(q, k, cos, sin, impl="triton", **options)


class Projections:
    """The same weights for every run of a scenario."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.q = nn.Linear(WIDTH, Q_HEADS * HEAD_DIM, bias=False, device=device)
        self.k = nn.Linear(WIDTH, K_HEADS * HEAD_DIM, bias=False, device=device)
        self.q_bias = nn.Linear(WIDTH, Q_HEADS * HEAD_DIM, device=device)
        self.k_bias = nn.Linear(WIDTH, K_HEADS * HEAD_DIM, device=device)
        self.qkv = nn.Linear(WIDTH, (Q_HEADS + 2 * K_HEADS) * HEAD_DIM, bias=False, device=device)
        self.x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
        self.norm = nn.LayerNorm(HEAD_DIM, device=device)

    def parameters(self):
        for name, value in vars(self).items():
            tensors = [("", value)] if isinstance(value, torch.Tensor) else value.named_parameters()
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in tensors)


Outputs = tuple[torch.Tensor, ...]  # rotated q and k, then whatever else enters the loss
Scenario = Callable[[Projections, Rotation], Outputs]


def plain_2d(p, rotate):
    return rotate(p.q(p.x), p.k(p.x), p.q, p.k)


def plain_3d(p, rotate):
    x = p.x.view(2, TOKENS // 2, WIDTH)
    return rotate(p.q(x), p.k(x), p.q, p.k)


def biased_2d(p, rotate):
    return rotate(p.q_bias(p.x), p.k_bias(p.x), p.q_bias, p.k_bias)


def biased_3d(p, rotate):
    x = p.x.view(2, TOKENS // 2, WIDTH)
    return rotate(p.q_bias(x), p.k_bias(x), p.q_bias, p.k_bias)


def viewed_as_heads(p, rotate):
    q, k = p.q(p.x).view(TOKENS, Q_HEADS, HEAD_DIM), p.k(p.x).view(TOKENS, K_HEADS, HEAD_DIM)
    return rotate(q, k, p.q, p.k)


def sliced_qkv(p, rotate):
    fused, q_width, k_width = p.qkv(p.x), Q_HEADS * HEAD_DIM, K_HEADS * HEAD_DIM
    q, k = rotate(fused[:, :q_width], fused[:, q_width : q_width + k_width], p.qkv, p.qkv)
    return q, k, fused[:, q_width + k_width :]


def split_qkv(p, rotate):
    q, k, v = p.qkv(p.x).split([Q_HEADS * HEAD_DIM, K_HEADS * HEAD_DIM, K_HEADS * HEAD_DIM], dim=-1)
    return (*rotate(q, k, p.qkv, p.qkv), v)


def lora(base: nn.Linear) -> LoraLinear:
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False)
    layer = LoraLinear(base, adapter_name="default", config=config, r=2, lora_alpha=4, init_lora_weights=False)
    return layer.to(base.weight.device)


def lora_sum(p, rotate):
    q_proj, k_proj = lora(p.q), lora(p.k_bias)
    x = p.x.view(2, TOKENS // 2, WIDTH)
    return rotate(q_proj(x), k_proj(x), q_proj, k_proj)


def lora_disabled(p, rotate):
    """PEFT then returns the base layer's own output."""
    q_proj, k_proj = lora(p.q), lora(p.k)
    q_proj.enable_adapters(False)
    k_proj.enable_adapters(False)
    return rotate(q_proj(p.x), k_proj(p.x), q_proj, k_proj)


def hooked(p, rotate):
    kept = []
    hook = p.q.register_forward_hook(lambda module, args, output: kept.append(output))
    q, k = rotate(p.q(p.x), p.k(p.x), p.q, p.k)
    hook.remove()
    return q, k, kept[0]


def hooked_inside_lora(p, rotate):
    kept = []
    q_proj = lora(p.q)
    hook = q_proj.base_layer.register_forward_hook(lambda module, args, output: kept.append(output))
    q_proj.enable_adapters(False)
    q, k = rotate(q_proj(p.x), p.k(p.x), q_proj, p.k)
    hook.remove()
    return q, k, kept[0]


def hooked_globally(p, rotate):
    kept = {}
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: kept.update({module: output}))
    q, k = rotate(p.q(p.x), p.k(p.x), p.q, p.k)
    hook.remove()
    return q, k, kept[p.q]


class Remembering(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def kept_by_its_module(p, rotate):
    q_proj = Remembering(WIDTH, Q_HEADS * HEAD_DIM, bias=False, device=p.x.device)
    q_proj.weight = p.q.weight
    q, k = rotate(q_proj(p.x), p.k(p.x), q_proj, p.k)
    return q, k, q_proj.last


def detached_alias(p, rotate):
    q = p.q(p.x)
    alias = q.detach()
    return (*rotate(q, p.k(p.x), p.q, p.k), alias)


def used_twice(p, rotate):
    q, k = p.q(p.x), p.k(p.x)
    squared = q.pow(2)  # saves q
    return (*rotate(q, k, p.q, p.k), squared)


def used_twice_unsaved(p, rotate):
    q, k = p.q(p.x), p.k(p.x)
    tripled = q * 3  # saves nothing of q: rotating q afterwards harms nobody
    return (*rotate(q, k, p.q, p.k), tripled)


def saved_output(p, rotate):
    """q_norm, or any operation that keeps its result for backward."""
    q = p.q(p.x).tanh()
    return rotate(q, p.k(p.x), p.q, p.k)


def normalised(p, rotate):
    q = p.norm(p.q(p.x).view(TOKENS, Q_HEADS, HEAD_DIM))
    k = p.norm(p.k(p.x).view(TOKENS, K_HEADS, HEAD_DIM))
    return rotate(q, k, p.norm, p.norm)


def selective_checkpoint(p, rotate):
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(lambda x: rotate(p.q(x), p.k(x), p.q, p.k), p.x, use_reentrant=False, context_fn=contexts)


def recomputed(p, rotate):
    return checkpoint(lambda x: rotate(p.q(x), p.k(x), p.q, p.k), p.x, use_reentrant=False)


def recomputed_reentrant(p, rotate):
    return checkpoint(lambda x: rotate(p.q(x), p.k(x), p.q, p.k), p.x, use_reentrant=True)


def shared_head(p, rotate):
    """One rotary key for all heads, as in multi-head latent attention."""
    q = p.q(p.x).view(TOKENS, Q_HEADS, HEAD_DIM)
    k = p.k(p.x)[:, :HEAD_DIM].unsqueeze(1).expand(TOKENS, K_HEADS, HEAD_DIM)
    return rotate(q, k, p.q, p.k)


def leaves(p, rotate):
    return rotate(p.q.weight[:TOKENS, :HEAD_DIM].unsqueeze(1), p.k.weight[:TOKENS, :HEAD_DIM].unsqueeze(1))


# What happens when the verdict is ignored: "same" results, a "refused" write, or a "wrong" gradient or stored value
# (an error that autograd raises in backward counts as refused: nothing false comes out).
SCENARIOS = [
    (plain_2d, "in place", "same"),
    (plain_3d, "in place", "same"),
    (biased_2d, "in place", "same"),
    (biased_3d, "out of place", "same"),  # a view: right, but backward copies the whole gradient of the base
    (viewed_as_heads, "out of place", "same"),
    (sliced_qkv, "out of place", "same"),
    (split_qkv, "out of place", "refused"),
    (lora_sum, "in place", "same"),
    (lora_disabled, "in place", "same"),
    (hooked, "out of place", "wrong"),
    (hooked_inside_lora, "out of place", "wrong"),
    (hooked_globally, "out of place", "wrong"),
    (kept_by_its_module, "out of place", "wrong"),
    (detached_alias, "out of place", "wrong"),
    (used_twice, "out of place", "refused"),
    (used_twice_unsaved, "in place", "same"),
    (saved_output, "out of place", "refused"),
    (normalised, "out of place", "same"),
    (selective_checkpoint, "out of place", "refused"),
    (recomputed, "in place", "same"),
    (recomputed_reentrant, "out of place", "same"),
    (shared_head, "out of place", "refused"),
    (leaves, "out of place", "refused"),
]


def run(scenario: Scenario, device: torch.device, mode: str) -> tuple[dict[str, torch.Tensor], Rotation]:
    """Everything observable: the outputs, what was stored on the way, and the gradient of every parameter."""
    projections, rotation = Projections(device), Rotation(device, mode, [], [])
    outputs = scenario(projections, rotation)
    observed = {f"output {index}": output.detach().clone() for index, output in enumerate(outputs)}
    generator = torch.Generator().manual_seed(1)
    differentiable = [output for output in outputs if output.requires_grad]
    upstream = [torch.randn(x.shape, generator=generator).to(device) for x in differentiable]
    torch.autograd.backward(differentiable, upstream)
    gradients = {name: tensor.grad for name, tensor in projections.parameters() if tensor.grad is not None}
    return {**observed, **gradients}, rotation


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert got.keys() == expected.keys()
    return all(torch.allclose(got[name], expected[name], rtol=1e-6, atol=1e-6) for name in expected)


@pytest.mark.parametrize(("scenario", "path", "forced"), SCENARIOS, ids=[row[0].__name__ for row in SCENARIOS])
def test_the_verdict_picks_a_path_that_is_right(device, scenario, path, forced):
    expected, _ = run(scenario, device, "eager")
    got, rotation = run(scenario, device, "verdict")
    assert (
        set(rotation.taken) <= {path, "in place"} if scenario is recomputed_reentrant else {path} == set(rotation.taken)
    )
    assert bool(rotation.refusals) is (path == "out of place")
    assert same(got, expected)


@pytest.mark.parametrize(("scenario", "path", "forced"), SCENARIOS, ids=[row[0].__name__ for row in SCENARIOS])
def test_ignoring_the_verdict_is_refused_or_wrong(device, scenario, path, forced):
    expected, _ = run(scenario, device, "eager")
    try:
        got, _ = run(scenario, device, "forced")
    except (KernelInputError, RuntimeError) as error:
        outcome = "refused"
        assert isinstance(error, KernelInputError) or "modified by an inplace operation" in str(error)
    else:
        outcome = "same" if same(got, expected) else "wrong"
    assert outcome == forced


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_verdict_is_no_and_writing_works(device, context):
    projections = Projections(device)
    with context():
        expected = plain_2d(projections, Rotation(device, "eager", [], []))
        rotation = Rotation(device, "verdict", [], [])
        got = plain_2d(projections, rotation)
        written = plain_2d(projections, Rotation(device, "forced", [], []))
    assert rotation.taken == ["out of place"] and "gradients are off" in rotation.refusals[0]
    for result in (got, written):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_writing_counts_as_a_change(device):
    """Whoever saved q or k is told, even under no_grad."""
    case = make_case((5,), device=device)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            versions = case.q._version, case.k._version
            rope_qk_(case.q, case.k, case.cos, case.sin, impl="triton")
            assert (case.q._version, case.k._version) > versions


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_in_place_returns_its_arguments(device, impl):
    case = make_case((5,), device=device)
    expected = rope_qk_reference(case.q, case.k, case.cos, case.sin)
    q, k = rope_qk_(case.q, case.k, case.cos, case.sin, impl=impl)
    assert q.data_ptr() == case.q.data_ptr() and k.data_ptr() == case.k.data_ptr()
    assert torch.equal(case.q, expected[0]) and torch.equal(case.k, expected[1])


def test_in_place_is_one_launch_and_leaves_no_copy_in_backward(device, monkeypatch):
    launches = record_launches(monkeypatch)
    rotation = Rotation(device, "verdict", [], [])
    q, k = plain_3d(Projections(device), rotation)
    assert len(launches) == 1 and launches[0]["IN_PLACE"] and rotation.taken == ["in place"]
    assert q.grad_fn is k.grad_fn and q.grad_fn.name() == "_RotateQKBackward"
    torch.autograd.backward((q, k), (torch.randn_like(q), torch.randn_like(k)))
    assert len(launches) == 2  # one more for both gradients
    viewed, _ = viewed_as_heads(Projections(device), Rotation(device, "forced", [], []))
    assert viewed._base.grad_fn.name().endswith("CopySlices")  # what the verdict saves


@pytest.mark.parametrize("views", ["q", "k", "qk"])
def test_views_are_marked_one_by_one(device, views):
    """Autograd lets a Function mark two tensors dirty, but no two views."""
    case = make_case((5,), device=device)
    leaves = {name: getattr(case, name).detach().clone().requires_grad_() for name in "qk"}
    written = {name: (leaf * 1)[:] if name in views else leaf * 1 for name, leaf in leaves.items()}
    q, k = rope_qk_(**written, cos=case.cos, sin=case.sin, impl="triton")
    assert q.grad_fn is not k.grad_fn
    torch.autograd.backward((q, k), (case.dq, case.dk))
    expected = case.triton()
    assert all(torch.equal(leaf.grad, expected[f"d{name}"]) for name, leaf in leaves.items())


@pytest.mark.parametrize("unused", ["q", "k"])
def test_in_place_with_one_output_unused(device, unused):
    case = make_case((5,), device=device)
    leaves = {name: getattr(case, name).detach().clone().requires_grad_() for name in "qk"}
    q, k = rope_qk_(leaves["q"] * 1, leaves["k"] * 1, case.cos, case.sin, impl="triton")
    used = "k" if unused == "q" else "q"
    {"q": q, "k": k}[used].backward(getattr(case, f"d{used}"))
    assert torch.equal(leaves[used].grad, case.triton()[f"d{used}"])
    assert leaves[unused].grad is None or not leaves[unused].grad.any()


@pytest.mark.parametrize("trained", ["q", "k"])
def test_in_place_with_one_side_frozen(device, trained):
    case = make_case((5,), device=device)
    leaf = getattr(case, trained).detach().clone().requires_grad_()
    args = {"q": case.q.clone(), "k": case.k.clone(), trained: leaf * 1}
    out = dict(zip("qk", rope_qk_(**args, cos=case.cos, sin=case.sin, impl="triton"), strict=True))
    assert [name for name in "qk" if out[name].requires_grad] == [trained]
    out[trained].backward(getattr(case, f"d{trained}"))
    assert torch.equal(leaf.grad, case.triton()[f"d{trained}"])


def test_verdict_reasons():
    projections = Projections(torch.device("cpu"))
    q = projections.q(projections.x)
    assert in_place_verdict(q, projections.q) and in_place_verdict(q)
    q.register_hook(lambda grad: grad)
    reasons = {
        "hooked": in_place_verdict(q),
        "a leaf": in_place_verdict(projections.q.weight),
        "without a gradient": in_place_verdict(torch.randn(3)),
        "SoftmaxBackward0": in_place_verdict(F.softmax(projections.q(projections.x), dim=-1)),
    }
    for expected, verdict in reasons.items():
        assert not verdict and expected in verdict.reason
    with torch.device("cpu"):  # a torch function mode: it sees, and may keep, every result
        assert "mode" in in_place_verdict(projections.q(projections.x)).reason
