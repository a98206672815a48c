"""The ways to treat activations until backward that checkpointing.py and longest.py measure, and a model made so.

All ways use one model, with fastft's kernels on every side: they differ in nothing but where activations wait.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import models, stacks, train_step

Line = dict[str, Any]
YARDSTICK = "fastft recompute"


@dataclass(frozen=True, slots=True)
class Way:
    """What fastft and transformers are told.

    Attributes:
        option: fastft's `checkpointing`.
        stock: what is switched on in the model besides; "TRL" is plain checkpointing inside of TRL's context.
        budget: fastft's `memory_budget`: "auto", or the ways whose mean peak it is.
        plain: for a way that offloads: the same way without, which tells how much of the copies is hidden.
    """

    option: str | Literal[False]
    stock: Literal["off", "on", "offload", "TRL"] = "on"
    budget: Literal["auto"] | tuple[str, ...] | None = None
    plain: str | None = None


WAYS: dict[str, Way] = {
    "none": Way(False, "off"),
    "stock checkpointing": Way(False),
    "stock offload": Way(False, "offload", plain="stock checkpointing"),
    "TRL offload": Way(False, "TRL", plain="stock checkpointing"),
    YARDSTICK: Way("recompute"),
    "fastft offload": Way("offload", plain=YARDSTICK),
    "planner, memory of checkpointing": Way("auto", budget=("stock checkpointing",)),
    "planner, half way": Way("auto", budget=("stock checkpointing", "none")),
    "planner, free memory": Way("auto", budget="auto"),
}


class Unavailable(Exception):
    """A way that cannot run here, and why."""


def add_workload(parser: argparse.ArgumentParser, documents: int) -> None:
    """The options that say what is trained."""
    parser.add_argument("--model", choices=models.PRESETS, default="Qwen3-8B")
    parser.add_argument("--layers", type=int, help="cut the model to this many decoder layers")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--documents", type=int, default=documents, help="of the row")
    parser.add_argument("--head-rows", type=int, default=512, help="rows of a piece of the loss")
    parser.add_argument("--optimizer", action="store_true", help="step AdamW, with a learning rate of zero")
    parser.add_argument("--deterministic", action="store_true", help="make PyTorch's kernels (attention) so")
    parser.add_argument("--seed", type=int, default=0)


@dataclass
class Setup:
    """The one model of a run, and what a step needs besides."""

    args: argparse.Namespace
    device: torch.device
    model: Any  # what fastft patches: with adapters
    causal: Any  # the transformers model inside
    optimizer: torch.optim.Optimizer | None
    facts: Line

    @property
    def input_bytes(self) -> int:
        """Of one token where it enters a layer."""
        return self.causal.config.hidden_size * self.causal.dtype.itemsize

    @property
    def layers(self) -> int:
        return self.causal.config.num_hidden_layers


def build(args: argparse.Namespace) -> Setup:
    """The model on its device, not yet told any way."""
    if args.deterministic:
        be_deterministic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    wanted = argparse.Namespace(**vars(args), stack="fastft", attention=None, patch_options="")
    built = stacks.build(wanted, device, tokenizer=None)
    model = causal = built.model.train()
    if built.peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(causal, built.peft_config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, which would leave A without a gradient to compare
                torch.nn.init.normal_(parameter, std=0.02)
    optimizer = None
    if args.optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0, fused=device.type == "cuda")
    facts = {
        "hardware": train_step.hardware(),
        "versions": train_step.versions(),
        "arguments": {key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return Setup(args, device, model, causal, optimizer, facts)


def be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It costs time, and nothing here reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def library() -> Any:
    """fastft, whose public names are made on first use, which a type checker does not see."""
    import fastft

    return fastft


def prepare(setup: Setup, way: Way, budget: int | Literal["auto"] | None) -> contextlib.AbstractContextManager[Any]:
    """Patches the model anew, in the order of a script and its trainer; the context that a step runs in."""
    causal = setup.causal
    library().unpatch_model(setup.model)  # what an earlier way held, and counted
    switch(causal, "disable")
    causal.disable_input_require_grads()  # else each switching on adds a hook
    options = {} if budget is None else {"memory_budget": budget}
    library().patch_model(setup.model, checkpointing=way.option, **options)
    if way.stock == "off":
        return contextlib.nullcontext()
    if way.stock in ("offload", "TRL") and setup.device.type != "cuda":
        raise Unavailable("offloading needs a GPU")
    switch(causal, "enable", {"use_reentrant": False}, **({"offload": True} if way.stock == "offload" else {}))
    if way.stock != "TRL":
        return contextlib.nullcontext()
    from trl.models.activation_offloading import OffloadActivations

    context: contextlib.AbstractContextManager[Any] = OffloadActivations()
    context.update_model_params(setup.model)  # type: ignore[attr-defined]
    return context


def switch(causal: Any, name: Literal["enable", "disable"], *args: Any, **options: Any) -> None:
    """Gradient checkpointing, which newer transformers call activation checkpointing."""
    method = getattr(causal, f"activation_checkpointing_{name}", None)
    method = method or getattr(causal, f"gradient_checkpointing_{name}")
    missing = options.keys() - inspect.signature(method).parameters.keys()
    if missing:
        raise Unavailable(f"this transformers has no checkpointing with {', '.join(sorted(missing))}")
    method(*args, **options)
