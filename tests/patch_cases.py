"""What the tests of patch_model compare: behaviour of a model, and everything that can be seen of its state."""

from __future__ import annotations

import sys
from typing import Any

import torch
from tiny_models import VOCAB, packed_batch
from torch import nn

LENGTHS = (5, 7, 3)


def rows(count: int = 2, length: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count, length), generator=generator)


def left_padded() -> dict[str, torch.Tensor]:
    attention_mask = torch.ones(2, 6, dtype=torch.long)
    attention_mask[0, :3] = 0
    return {"input_ids": rows().masked_fill(attention_mask == 0, 0), "attention_mask": attention_mask}


def behaviour(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of packed, padded and plain batches, and generated tokens, in a fixed order."""
    seen: dict[str, torch.Tensor] = {}
    padded = left_padded()
    real = padded["attention_mask"] != 0
    labels = padded["input_ids"].masked_fill(~real, -100)
    labels[0, 3] = -100  # the first token of its row: only padding could predict it
    for name, batch in (
        ("packed", {**packed_batch(LENGTHS), "use_cache": False}),  # with a cache, stock mixes the sequences
        ("padded", {**padded, "labels": labels}),
        ("rows", {"input_ids": rows(), "labels": rows()}),
    ):
        model.train()
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        # At padding stock has numbers that mean nothing, and fastft zeros.
        seen[f"{name} logits"] = output.logits.detach()[real if name == "padded" else ...]
        seen |= {
            f"{name} gradient of {key}": p.grad.clone() for key, p in model.named_parameters() if p.grad is not None
        }
    model.zero_grad()
    model.eval()
    for name, options in (("greedy", {}), ("static cache", {"cache_implementation": "static"})):
        seen[name] = model.generate(**padded, max_new_tokens=4, do_sample=False, disable_compile=True, **options)
    model.train()
    return seen


def assert_same_behaviour(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Bitwise: an unpatched model must not so much as round differently."""
    actual = behaviour(model)
    assert actual.keys() == expected.keys()
    assert len(actual) > 30  # logits and gradients were compared, not an empty set
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def train_step(model: nn.Module) -> float:
    loss = model(**packed_batch(LENGTHS)).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return float(loss.detach())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module by identity, containers by their items, configs by their fields."""
    seen: dict[str, Any] = {
        "state_dict": list(model.state_dict()),
        "modules": [fqn for fqn, _ in model.named_modules()],
    }
    for fqn, module in model.named_modules():
        seen[f"{fqn}: class"] = type(module)
        seen[f"{fqn}: names"] = sorted(module.__dict__)
        for name, value in module.__dict__.items():
            if isinstance(value, dict):  # parameters, submodules and hooks, with the flags of hooks
                seen[f"{fqn}.{name}"] = [(key, id(item)) for key, item in value.items()]
            else:
                seen[f"{fqn}.{name}"] = value if isinstance(value, bool) else id(value)
        config = module.__dict__.get("config")
        if config is not None:
            seen[f"{fqn}: config fields"] = {key: (id(value), str(value)) for key, value in config.__dict__.items()}
    return seen


def library_snapshot() -> dict[str, Any]:
    """Every attribute of transformers' loaded modules, and of the classes in them, by identity."""
    seen: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(
            ("transformers.models", "transformers.modeling", "transformers.masking", "peft.")
        ):
            continue
        for name, value in list(vars(module).items()):
            seen[f"{module_name}.{name}"] = id(value)
            if isinstance(value, type):
                # Python itself notes __slotnames__ on a class when an instance is copied.
                entries = {key: id(item) for key, item in vars(value).items() if key != "__slotnames__"}
                seen |= {f"{module_name}.{name}.{key}": item for key, item in entries.items()}
    return seen


def counters(model: nn.Module) -> dict[str, int]:
    import fastft

    return dict(fastft.report(model).counters)


def skipped_reasons(model: nn.Module) -> dict[tuple[str, str], str]:
    """(module, op) -> why it stays stock, apart from LoRA in a model without adapters."""
    import fastft

    return {
        (item.fqn, item.op): item.reason
        for item in fastft.report(model).skipped
        if item.reason != "no adapter yet; fused when PEFT adds one"
    }


def attention_calls(model: nn.Module) -> int:
    """How many attention calls one of fastft's engines computed, whichever it was."""
    return sum(count for name, count in counters(model).items() if name.startswith("attention: "))
