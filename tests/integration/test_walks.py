"""What trainers ask of a whole model: the answers are nn.Module's, and sooner there."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import nn

import fastft
from fastft.errors import UnsupportedOptionError
from fastft.modules import walks

NAMES = ("train", "parameters", "num_parameters")


def adapted(**options):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], **options)
    return get_peft_model(tiny_model("llama", tie_word_embeddings=True), config)


def answers(model):
    """Everything that is asked, of the inner model as well."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    sizes = [inner.num_parameters(trained, bare) for trained in (False, True) for bare in (False, True)]
    return [id(x) for x in model.parameters()], [id(x) for x in inner.parameters()], sizes


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("make", [lambda: tiny_model("qwen3"), lambda: tiny_model("llama"), adapted])
def test_parameters_and_sizes_are_those_of_modules(make):
    model = make()
    expected = answers(model)
    assert len({*expected[2]}) > 1
    fastft.patch_model(model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert all(name in inner.__dict__ for name in NAMES)
    assert answers(model) == expected
    assert [*model.parameters(recurse=False)] == [*type(model).parameters(model, recurse=False)]


def test_modules_and_parameters_that_are_there_twice_count_once_in_their_order():
    model = tiny_model("llama")
    shared = nn.Linear(3, 3)
    model.twice = nn.ModuleList([shared, nn.Sequential(nn.Linear(3, 2), shared)])
    model.twice[1][0].bias = shared.bias
    model.none = None
    model.register_module("absent", None)
    expected = answers(model)
    fastft.patch_model(model)
    assert answers(model) == expected


def test_what_comes_later_is_seen():
    model = fastft.patch_model(tiny_model("llama"))
    model.extra = nn.Linear(3, 3)
    model.extra.eval()
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    assert answers(model) == answers(fastft.unpatch_model(model))
    fastft.patch_model(model)
    model.train()
    assert all(modes(model))


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_every_module_is_put_in_the_mode(start, mode):
    model = fastft.patch_model(adapted())
    for place in (0, 5, -1):
        type(model).train(model, start)
        list(model.modules())[place].training = not start
        assert model.train(mode) is model
        assert set(modes(model)) == {mode}
    assert set(modes(model.eval())) == {False}


def test_a_module_with_a_train_of_its_own_is_asked():
    class Watching(nn.Linear):
        asked = 0

        def train(self, mode=True):
            self.asked += 1
            return super().train(mode)

    model = fastft.patch_model(tiny_model("llama"))
    model.own = Watching(2, 2)
    for _ in range(3):
        model.train()
    assert model.own.asked == 3
    del model.own
    seen = []
    model.model.norm.train = seen.append
    model.train()
    assert seen == [True]


def test_a_mode_that_is_no_bool_is_refused_as_stock_refuses_it():
    model = fastft.patch_model(tiny_model("llama"))
    with pytest.raises(ValueError, match="boolean"):
        model.train("yes")


def test_a_class_that_answers_itself_keeps_its_answer():
    model = tiny_model("llama")

    class Own(type(model)):
        def parameters(self, recurse=True):
            return iter(())

    model.__class__ = Own
    fastft.patch_model(model)
    assert "parameters" not in model.__dict__ and "num_parameters" not in model.__dict__
    assert [*model.parameters()] == []


def test_walks_that_are_replaced_on_an_instance_or_below():
    class Hiding(nn.Sequential):
        def named_modules(self, memo=None, prefix="", remove_duplicate=True):
            yield prefix, self

    model = fastft.patch_model(tiny_model("llama"))
    model.hiding = Hiding(nn.Linear(2, 2))
    assert answers(model) == answers(fastft.unpatch_model(model))
    fastft.patch_model(model)
    model.named_parameters = lambda *args, **kwargs: iter([("only", model.lm_head.weight)])
    assert [*model.parameters()] == [model.lm_head.weight] and model.num_parameters() == model.lm_head.weight.numel()


def test_parameters_that_are_replaced_in_between():
    model = fastft.patch_model(tiny_model("llama"))
    modules = [module for module in model.modules() if module._parameters]
    count = 0
    for _ in model.parameters():
        count += 1
        for module in modules[count:]:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
    assert count == sum(parameter is not None for module in modules for parameter in module._parameters.values())


@pytest.mark.parametrize("first", ["peft", "patch"])
def test_the_model_inside_of_peft_answers_soonest(first):
    model = tiny_model("llama")
    config = LoraConfig(r=4, target_modules=["q_proj"])
    if first == "patch":
        fastft.patch_model(model)
    peft = get_peft_model(model, config)
    fastft.patch_model(peft)
    assert walks.is_bound(model) and not any(name in peft.__dict__ for name in NAMES)
    expected = answers(fastft.unpatch_model(peft))
    assert answers(fastft.patch_model(peft)) == expected
    peft.eval()
    assert set(modes(peft.train())) == {True}


def test_methods_of_an_instances_own_stay_and_are_not_reported_for_ever():
    model = tiny_model("llama")
    seen = []
    model.train = seen.append
    fastft.patch_model(model)
    model.train(True)
    assert seen == [True]
    assert "walks" in {item.op for item in fastft.report(model).replaced}
    fastft.unpatch_model(model)
    assert model.train == seen.append


def test_copies_have_methods_of_their_own_and_pickles_those_of_the_class():
    model = fastft.patch_model(tiny_model("llama"))
    copied = copy.deepcopy(model)
    copied.extra = nn.Linear(2, 2)
    assert {id(x) for x in copied.extra.parameters()} <= {id(x) for x in copied.parameters()}
    assert not {id(x) for x in copied.parameters()} & {id(x) for x in model.parameters()}
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert not walks.is_bound(loaded)
    assert [x.shape for x in loaded.parameters()] == [x.shape for x in model.parameters()]
    for each in (model, copied, loaded):
        fastft.unpatch_model(each)
        assert not any(name in each.__dict__ for name in NAMES)


def test_it_can_be_left_out_and_is_reported():
    model = fastft.patch_model(tiny_model("llama"), walks=False)
    assert not any(name in model.__dict__ for name in NAMES)
    assert [item.reason for item in fastft.report(model).skipped if item.op == "walks"] == ["walks=False"]
    fastft.patch_model(model)
    assert "walks" in {item.op for item in fastft.report(model).replaced}
    del model.__dict__["train"]
    assert any(item.op == "walks" and "put back" in item.reason for item in fastft.report(model).skipped)
    fastft.patch_model(model)
    assert "train" in model.__dict__
    with pytest.raises(UnsupportedOptionError, match="walks"):
        fastft.patch_model(model, walks="fast")
