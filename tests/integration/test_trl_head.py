"""TRL's head on a patched model: the numbers of TRL's own, with one product of matrices less, and nobody else's."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
import trl.trainer.utils as trl_utils
from budget import assert_mutant_caught, assert_within_budget
from patch_cases import counters
from peft import LoraConfig, get_peft_model
from sft_cases import STEPS, equal_training, sft
from tiny_models import tiny_model
from trl.trainer.utils import add_fused_lm_head

import fastft
from fastft.errors import UnsupportedOptionError
from fastft.integrations import trl_head

OPS = ("attention", "rope", "rms_norm", "add_rms_norm", "gated_mlp", "lora", "experts")
OUTPUTS = ("log_probs", "entropy", "is_top1")
FUNCTION = trl_utils._ChunkedLogProbFunction


@pytest.fixture(autouse=True)
def trls_function_stays():
    yield
    assert trl_utils._ChunkedLogProbFunction is FUNCTION


def frozen_head(family="llama", **options):
    model = tiny_model(family, **options)
    head = model.lm_head.weight
    with torch.no_grad():
        head.mul_(8)
    head.requires_grad_(False)
    return model


def batch(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (4, 33), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[1, 9:] = -100
    labels[2] = -100
    return {"input_ids": ids, "labels": labels, "fused_lm_head": True}


def trls(model, inputs, temperature, outputs):
    """What TRL's head returns, with whatever is in the place of its function."""
    add_fused_lm_head(model, temperature=temperature, outputs=outputs)
    found = model(**inputs)
    return {name: getattr(found, name) for name in (*outputs, "loss", "label_mask")}


def plain(model, inputs, temperature, outputs):
    """The same of the logits of all tokens, in the model's dtype."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1] / temperature
    labels = inputs["labels"][:, 1:]
    mask = labels != -100
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    found = {"log_probs": log_probs, "entropy": -(log_p.exp() * log_p).sum(-1) * mask}
    found["mean_logits"] = logits.mean(-1) * mask
    found |= {"is_top1": (logits.argmax(-1) == labels) & mask, "label_mask": mask}
    found["loss"] = -log_probs.sum() / mask.sum()
    return {name: found[name] for name in (*outputs, "loss", "label_mask")}


def results(model, function=trls, *, temperature=1.0, outputs=OUTPUTS, entropy=0.0, **inputs):
    """Outputs, and the gradients of a loss that weighs each token otherwise: by hidden states and by parameters."""
    model.zero_grad()
    hidden = []
    hook = model.model.register_forward_hook(lambda module, args, out: hidden.append(out.last_hidden_state))
    told = function(model, {**batch(model), **inputs}, temperature, outputs)
    weights = torch.randn(told["log_probs"].shape, generator=torch.Generator().manual_seed(1)).to(told["log_probs"])
    loss = (weights * told["log_probs"]).sum()
    if entropy:
        loss = loss + entropy * (weights.abs() * told["entropy"]).sum()
    hook.remove()
    hidden[-1].retain_grad()
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: value.detach() for name, value in {**told, "hidden": hidden[-1].grad, **grads}.items()}


def compare(stock, ours, **options):
    """The head within the budget of same-dtype eager, by an oracle in fp64; what is not its own only close."""
    oracle = results(copy.deepcopy(stock).double(), plain, **options)
    eager, found = results(stock, **options), results(ours, **options)
    assert found.keys() == eager.keys() == oracle.keys()
    numbers = [name for name in ("log_probs", "entropy", "hidden") if name in oracle]
    for name in oracle.keys() - set(numbers):
        scale = oracle[name].double().abs().max().item()
        torch.testing.assert_close(found[name], oracle[name].to(found[name].dtype), rtol=1e-4, atol=1e-5 * scale)
    found, eager, oracle = ({name: each[name] for name in numbers} for each in (found, eager, oracle))
    assert_within_budget(found, eager, oracle)
    assert_mutant_caught({**found, "log_probs": found["log_probs"] * 1.01}, eager, oracle)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"temperature": 0.7}),
        ("llama", {"outputs": ("log_probs",)}),
        ("llama", {"entropy": 0.3}),
        ("llama", {"temperature": 1.3, "outputs": (*OUTPUTS, "mean_logits")}),
        ("granite", {"outputs": ("log_probs", "mean_logits")}),
        ("gemma2", {}),  # a softcap
        ("gemma2", {"temperature": 1.5, "entropy": 0.3}),
        ("granite", {}),  # divides logits
        ("cohere2", {"temperature": 2.0}),  # multiplies them
    ],
    ids=str,
)
def test_log_probs_and_gradients_are_those_of_trls_head(family, options):
    stock = frozen_head(family)
    ours = fastft.patch_model(copy.deepcopy(stock))
    compare(stock, ours, **options)
    assert counters(ours)["loss"] == 1


def test_under_autocast():
    stock = frozen_head().to(torch.bfloat16)
    oracle = results(copy.deepcopy(stock).double(), plain, entropy=0.1)
    ours = fastft.patch_model(copy.deepcopy(stock))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = results(ours, entropy=0.1), results(stock, entropy=0.1)
    found, expected, oracle = (
        {name: each[name] for name in ("log_probs", "entropy", "hidden")} for each in (found, expected, oracle)
    )
    assert_within_budget(found, expected, oracle)
    for name in ("entropy", "hidden"):
        assert_mutant_caught({**found, name: found[name] * 1.1}, expected, oracle)
    assert counters(ours)["loss"] == 1


@pytest.mark.parametrize(
    ("reason", "dtype"), [("in another dtype", torch.bfloat16), ("fp16 would lose small gradients", torch.float16)]
)
def test_dtypes_that_are_left_to_trl(reason, dtype):
    """A head in fp32 would be copied whole; and the gradient of fp16 comes before the loss's scale."""
    model = fastft.patch_model(frozen_head())
    if dtype == torch.float16:
        model.lm_head.half()
    with torch.autocast("cpu", dtype):
        results(model)
    assert [name for name in counters(model) if reason in name] and "loss" not in counters(model)


def test_trls_function_is_not_called(monkeypatch):
    class Refusing(FUNCTION):
        @staticmethod
        def apply(*args):
            raise AssertionError("TRL's own function ran")

    model = fastft.patch_model(frozen_head())
    with monkeypatch.context() as patch:
        patch.setattr(trl_utils, "_ChunkedLogProbFunction", Refusing)
        results(model)
        with pytest.raises(AssertionError, match="TRL's own function ran"):
            results(fastft.unpatch_model(model))


def test_adapters_that_come_later_and_a_tied_head():
    model = fastft.patch_model(tiny_model("llama", tie_word_embeddings=True))
    add_fused_lm_head(model, outputs=OUTPUTS)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    loss = peft(**batch(model)).loss
    loss.backward()
    assert counters(model)["loss"] == 1
    adapters = {name: x.grad.clone() for name, x in peft.named_parameters() if x.grad is not None}
    peft.zero_grad()
    fastft.unpatch_model(peft)
    peft(**batch(model)).loss.backward()
    for name, x in peft.named_parameters():
        if x.grad is not None:
            torch.testing.assert_close(adapters[name], x.grad, rtol=1e-4, atol=1e-6)
    assert adapters


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("the head is trained", lambda model: model.lm_head.weight.requires_grad_()),
        ("log_sum_sq_probs is asked for", {"outputs": ("log_probs", "log_sum_sq_probs")}),
        ("no token has a target", {"labels": torch.full((4, 33), -100)}),
        ("a tensor is not a plain one", lambda model: setattr(model.lm_head, "weight", Odd(model.lm_head.weight))),
    ],
)
def test_what_is_left_to_trl(reason, change, monkeypatch):
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)  # as on a GPU, only tokens with a target
    monkeypatch.setattr("trl.kernels.chunked_logprob._use_triton", lambda device: False)
    stock = frozen_head()
    options = change if isinstance(change, dict) else {}
    if not options:
        change(stock)
    ours = fastft.patch_model(copy.deepcopy(stock))
    options = {"outputs": OUTPUTS, **options}
    found, expected = results(ours, **options), results(stock, **options)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert counters(ours).get("loss", 0) == 0
    assert [name for name in counters(ours) if reason in name and name.startswith("loss by TRL's own head")]


class Odd(torch.nn.Parameter):
    """A parameter of another class."""

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), type(self)(self.data.clone(), requires_grad=self.requires_grad))


def test_evaluation_is_left_to_trl():
    model = fastft.patch_model(frozen_head())
    add_fused_lm_head(model, outputs=OUTPUTS)
    with torch.no_grad():
        model(**batch(model))
    assert (
        counters(model).get("loss", 0) == 0
        and counters(model)["loss by TRL's own head: no gradients are asked for"] == 1
    )


def test_without_trls_head_nothing_changes():
    stock = frozen_head()
    model = fastft.patch_model(copy.deepcopy(stock))
    assert model.get_output_embeddings() is model.lm_head
    inputs = {**batch(model), "fused_lm_head": False}
    torch.testing.assert_close(model(**inputs).loss, stock(**inputs).loss)
    assert not any(name.startswith("loss") for name in counters(model))


def test_other_models_between_a_request_and_its_call_are_trls(monkeypatch):
    """An exception leaves a stand-in behind, and another thread may come in between."""
    patched, other = fastft.patch_model(frozen_head()), frozen_head()
    for model in (patched, other):
        add_fused_lm_head(model, outputs=OUTPUTS)
    with monkeypatch.context() as patch:
        patch.setattr(trl_utils, "maybe_gather_lm_head_ctx", None)
        with pytest.raises(TypeError):
            patched(**batch(patched))
    assert trl_utils._ChunkedLogProbFunction is not FUNCTION
    thread = threading.Thread(target=lambda: other(**batch(other)).loss.backward())
    thread.start(), thread.join()
    assert other.model.layers[0].mlp.up_proj.weight.grad is not None
    other(**batch(other)).loss.backward()
    assert trl_utils._ChunkedLogProbFunction is FUNCTION
    assert counters(patched)["loss by TRL's own head: it is not the model's own head"] == 1
    patched(**batch(patched)), other(**batch(other)), patched(**batch(patched))
    assert counters(patched)["loss"] == 2


def test_copies_pickles_and_the_way_back():
    model = fastft.patch_model(frozen_head())
    copied = copy.deepcopy(model)
    assert copied.get_output_embeddings() is copied.lm_head is not model.lm_head
    results(copied)
    assert counters(copied)["loss"] == 1 and counters(model).get("loss", 0) == 0
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    again = fastft.patch_model(copy.deepcopy(loaded))
    assert trl_head.is_bound(again) and "loss" in {item.op for item in fastft.report(again).replaced}
    assert loaded.get_output_embeddings() is loaded.lm_head and not trl_head.is_bound(loaded)
    for each in (model, copied, loaded):
        fastft.unpatch_model(each)
        assert "get_output_embeddings" not in each.__dict__


def test_what_an_exception_leaves_behind_ends_with_the_patch(monkeypatch):
    model = fastft.patch_model(frozen_head())
    add_fused_lm_head(model, outputs=OUTPUTS)
    head = weakref.ref(model.lm_head)
    for way_out in ("unpatch", "delete"):
        with monkeypatch.context() as patch:
            patch.setattr(trl_utils, "maybe_gather_lm_head_ctx", None)
            with pytest.raises(TypeError):
                model(**batch(model))
        if way_out == "unpatch":
            fastft.unpatch_model(model)
            assert trl_utils._ChunkedLogProbFunction is FUNCTION
            fastft.patch_model(model)
    del model
    gc.collect()
    assert head() is None
    other = frozen_head()
    add_fused_lm_head(other, outputs=OUTPUTS)
    other(**batch(other)).loss.backward()
    assert trl_utils._ChunkedLogProbFunction is FUNCTION


def test_a_method_of_the_instances_own_stays():
    model = tiny_model("llama")
    other = torch.nn.Linear(2, 2)
    model.get_output_embeddings = lambda: other
    fastft.patch_model(model)
    assert model.get_output_embeddings() is other
    assert next(item.reason for item in fastft.report(model).skipped if item.op == "loss").endswith("was replaced")
    fastft.unpatch_model(model)
    assert model.get_output_embeddings() is other


def test_another_version_of_trls_function_is_left_alone(monkeypatch):
    class Changed(FUNCTION):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature, top_k, *rest):
            return FUNCTION.forward(ctx, hidden, weight, bias, targets, temperature, top_k, *rest)

    model = fastft.patch_model(frozen_head())
    with monkeypatch.context() as patch:
        patch.setattr(trl_utils, "_ChunkedLogProbFunction", Changed)
        add_fused_lm_head(model, outputs=OUTPUTS)
        with torch.no_grad():
            model(**batch(model))
    assert counters(model)["loss by TRL's own head: this version of TRL calls it otherwise"] == 1


def test_second_derivatives_are_refused():
    model = fastft.patch_model(frozen_head())
    add_fused_lm_head(model, outputs=OUTPUTS)
    found = model(**batch(model))
    for name in ("entropy", "log_probs"):
        with pytest.raises(UnsupportedOptionError, match="loss=False"):
            torch.autograd.grad(
                getattr(found, name).sum(), model.model.norm.weight, create_graph=True, retain_graph=True
            )


def test_only_tokens_with_a_target_on_a_gpu(monkeypatch):
    """The way that TRL takes there: hidden states of the valid places alone."""
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)
    monkeypatch.setattr("trl.kernels.chunked_logprob._use_triton", lambda device: False)
    stock = frozen_head()
    ours = fastft.patch_model(copy.deepcopy(stock))
    compare(stock, ours, entropy=0.2)
    assert counters(ours)["loss"] == 1


def test_options_and_the_report():
    model = fastft.patch_model(frozen_head(), loss="reference")
    results(model)
    assert counters(model)["loss"] == 1
    assert [item.impl for item in fastft.report(model).replaced if item.op == "loss"] == ["reference"]
    fastft.patch_model(model, loss=False)
    results(model)
    assert not any(name.startswith("loss") for name in counters(model))
    assert [item.reason for item in fastft.report(model).skipped if item.op == "loss"] == ["loss=False"]
    with pytest.raises(UnsupportedOptionError, match="loss"):
        fastft.patch_model(model, loss="fast")
    with pytest.raises(UnsupportedOptionError, match="no head over a vocabulary"):
        fastft.patch_model(model.model, loss="chunked")
    nothing = dict.fromkeys((*OPS, "packing"), False)
    with pytest.raises(UnsupportedOptionError, match="no other part of the model is patched"):
        fastft.patch_model(frozen_head(), loss="chunked", **nothing)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"packing": False}], ids=str)
def test_the_training_and_the_metrics_of_stock(tmp_path, options):
    stock = sft(tmp_path / "stock", patch=False, lora=True, **options)
    ours = sft(tmp_path / "ours", patch="before", lora=True, **options)
    stock.train(), ours.train()
    equal_training(stock, ours)
    assert counters(ours.model)["loss"] == STEPS
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        logged = [[entry[name] for entry in each.state.log_history if name in entry] for each in (ours, stock)]
        assert logged[0] == pytest.approx(logged[1], rel=1e-4) and len(logged[0]) >= STEPS
