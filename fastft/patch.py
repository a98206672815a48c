"""`patch_model` and `unpatch_model`: probe, plan, check, bind, record; and the way back."""

from __future__ import annotations

import logging
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from . import configs
from .config import PatchConfig
from .errors import PatchConflictError, UnsupportedModelError, UnsupportedOptionError
from .integrations import trl_head
from .integrations.bitsandbytes import FourBitWeights
from .memory.activations import ActivationMemory, Budget
from .memory.schedule import OFFLOAD, RECOMPUTE, Mode
from .memory.tape import THIN
from .model_report import Report
from .modules import walks
from .modules.names import ImplementationName
from .modules.state import ATTRIBUTE, BackboneRules, ModelState, ModuleState, state_of
from .plan import NO_ADAPTER, Binding, Plan, Replacement, Skipped, make_plan
from .structure import positional_names, pretrained_model

__all__ = ["patch_model", "report", "unpatch_model"]

logger = logging.getLogger("fastft")
ModelT = TypeVar("ModelT", bound=nn.Module)
_MODES: dict[str, Mode] = {"offload": OFFLOAD, "selective": THIN}


def patch_model(model: ModelT, config: PatchConfig | None = None, **options: Any) -> ModelT:
    """Make a Hugging Face model train faster, in place, without changing what it computes.

    Call it once, before or after PEFT wraps the model, before or after it moves to its device, before or after a
    trainer is built. A second call with the same options changes nothing; with others it patches anew.

    Args:
        model: a `PreTrainedModel` or `PeftModel` (or one of these inside DDP or torch.compile).
        config: what to replace; everything "auto" by default.
        **options: fields of `PatchConfig` by name, over `config`.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: not a Hugging Face model.
        UnsupportedOptionError: an unknown option, or one named explicitly that cannot be honoured here.
        PatchConflictError: the model has to be patched anew, and `unpatch_model` refuses.
    """
    target = _target(model)
    if not isinstance(config, PatchConfig | None):
        raise UnsupportedOptionError(
            f"config must be a PatchConfig, got {type(config).__name__}; options can be given by name instead: "
            "patch_model(model, rope=False)"
        )
    wanted = (config or PatchConfig()).with_options(options)
    plan = make_plan(target, wanted, _bound_names(target))
    if _is_patched_so(target, wanted, plan):
        return model
    unpatch_model(target)  # a model that was loaded from a pickle carries leftovers, too
    _apply(target, wanted, plan)
    logger.info("%s", Report(type(target).__name__, plan.replaced, plan.skipped, {}).summary())
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model`: forwards, hooks and configs are what they were. A model that is not patched is left alone.

    What the caller changed in the model's config in the meantime is carried over to the former config object.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: not a Hugging Face model.
        PatchConflictError: something replaced a forward of fastft after patching, and would go on calling it.
    """
    target = _target(model)
    _refuse_buried_forwards(target)
    from .modules import decoder

    states = _shared_states(target)
    _uninstall_memory(target)
    walks.unbind(target)
    trl_head.unbind(target)
    for module in target.modules():
        decoder.unfuse(module)
        _remove_hooks(module)
        if ATTRIBUTE in module.__dict__:
            _unbind(module)
            del module.__dict__[ATTRIBUTE]
    configs.restore_configs(target, [entry for shared in states for entry in shared.configs])
    return model


def report(model: nn.Module) -> Report:
    """What fastft replaced in `model`, what it did not and why, and what has run since.

    Returns:
        A `Report`; print it. For a model that is not patched it says so; one that fastft cannot help at all is
        reported with the reasons.

    Raises:
        UnsupportedModelError: not a Hugging Face model.
    """
    target = _target(model)
    states = _shared_states(target)
    name = type(target).__name__
    if not states:
        possible = make_plan(target, PatchConfig(), _bound_names(target), strict=False)
        return Report(f"{name} (not patched)", (), () if possible.bindings else possible.skipped, {})
    plan = make_plan(target, states[0].config, _bound_names(target), strict=False)
    replaced, skipped = _as_bound(target, plan)
    counters = [shared.counters for shared in states] + [memory.counters for memory in _memories(target)]
    plans = [memory.plan for memory in _memories(target) if memory.plan is not None]
    return Report(name, replaced, skipped, sum(counters, Counter()), plans[0] if plans else None)


def _as_bound(target: nn.Module, plan: Plan) -> tuple[tuple[Replacement, ...], tuple[Skipped, ...]]:
    """What of a plan is in effect, and what is not: modules and configs may have changed since patching."""
    modules = dict(target.named_modules())
    replaced: list[Replacement] = []
    skipped: list[Skipped] = []
    for item in plan.replaced:
        problem = _why_not_in_effect(modules[item.fqn], item.op)
        if problem:
            skipped.append(Skipped(item.fqn, item.op, problem))
        else:
            replaced.append(item)
    for left in plan.skipped:
        problem = _why_not_in_effect(modules[left.fqn], left.op) if left.reason == NO_ADAPTER else ""
        skipped.append(Skipped(left.fqn, left.op, problem) if problem else left)
    return tuple(replaced), tuple(skipped)


def _why_not_in_effect(module: nn.Module, op: str) -> str:
    from .integrations import peft_experts

    if op == "checkpointing":
        return ""
    if op in ("loss", "walks"):
        # PEFT may have come around the model since.
        bound = (trl_head if op == "loss" else walks).is_bound(pretrained_model(module) or module)
        return "" if bound else "its methods were put back; call patch_model again"
    state = state_of(module)
    if state is None:
        # The layer around experts binds what PEFT has put around them, before its next forward.
        experts = peft_experts.wrapped_experts(module)
        adopted = experts is not None and state_of(experts) is not None
        return "" if adopted else "added after patching; call patch_model again"
    if op == "add_rms_norm":
        from .modules.decoder import FusedLayer

        return "" if isinstance(module, FusedLayer) else "its class was put back; call patch_model again"
    if op in ("packing", "attention", "experts"):
        config: Any = module.config
        name = config._experts_implementation if op == "experts" else config._attn_implementation
        ours = isinstance(name, ImplementationName)
        return "" if ours else f"{name!r} was selected after patching; call patch_model again"
    return "" if state.bound and "forward" in module.__dict__ else "its forward was put back; call patch_model again"


# -------------------------------------------------------------------------------------------------------- target


def _target(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside wrappers that own none of its behaviour."""
    target = model
    while True:
        inner = getattr(target, "_orig_mod", None)  # torch.compile
        if inner is None and isinstance(target, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = target.module
        if inner is None:
            break
        target = inner
    from transformers import PreTrainedModel

    peft = sys.modules.get("peft")
    if isinstance(target, PreTrainedModel) or (peft is not None and isinstance(target, peft.PeftModel)):
        return target
    raise UnsupportedModelError(
        f"fastft patches a transformers PreTrainedModel or a PeftModel, not a {type(model).__name__}; "
        "pass the model itself, not its trainer or a module of your own around it"
    )


def _shared_states(target: nn.Module) -> list[ModelState]:
    """One, or several if parts of the model were patched on their own, or none."""
    states = (state_of(module) for module in target.modules())
    return list(dict.fromkeys(state.shared for state in states if state is not None))


def _is_patched_so(target: nn.Module, config: PatchConfig, plan: Plan) -> bool:
    """Whether patching by this plan would change nothing."""
    states = _shared_states(target)
    if len(states) != 1 or states[0].config != config:
        return False
    modules = dict(target.named_modules())
    patched = {fqn for fqn, module in modules.items() if state_of(module) is not None}
    if any(_why_not_in_effect(target, item.op) for item in plan.replaced if item.op in ("loss", "walks")):
        return False
    return patched == {binding.fqn for binding in plan.bindings} and all(
        _is_bound_so(modules[binding.fqn], binding) for binding in plan.bindings
    )


def _is_bound_so(module: nn.Module, binding: Binding) -> bool:
    state = state_of(module)
    wanted = (binding.kind, binding.bind_forward, binding.rules or BackboneRules())
    if state is None or (state.kind, state.bound, state.rules) != wanted:
        return False
    if binding.bind_forward and "forward" not in module.__dict__:
        return False
    if binding.kind == "decoder_layer":
        from .modules.decoder import FusedLayer

        return isinstance(module, FusedLayer)
    return binding.kind not in ("backbone", "experts") or _is_selected(module, binding.kind)


def _is_selected(module: Any, kind: str) -> bool:
    """Somebody may have selected another implementation since."""
    config = module.config
    name = config._experts_implementation if kind == "experts" else config._attn_implementation
    return isinstance(name, ImplementationName)


# ---------------------------------------------------------------------------------------------- bound forwards


def _forwards() -> dict[str, Callable[..., Any]]:
    from .integrations import peft_experts
    from .modules import attention, mlp, norm

    return {
        "attention": attention.forward,
        "mlp": mlp.forward,
        "rms_norm": norm.forward,
        peft_experts.KIND: peft_experts.forward,
    }


def _slot(module: nn.Module) -> str:
    """Where the module keeps the forward below accelerate's device hooks, which may come after patching."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def _is_ours(module: nn.Module) -> bool:
    """Whether the module's forward is fastft's, or the class's own, as a pickle or removed hooks leave it behind."""
    slot = _slot(module)
    function = getattr(module.__dict__.get(slot), "__func__", None)
    idle = slot == "forward" and function is type(module).forward
    return function is not None and (idle or function in _forwards().values())


def _bound_names(target: nn.Module) -> frozenset[str]:
    """Modules where a forward of fastft is, even if something else lies over it by now."""
    names = set()
    for fqn, module in target.named_modules():
        state = state_of(module)
        if (state is not None and state.bound) or _is_ours(module):
            names.add(fqn)
    return frozenset(names)


def _refuse_buried_forwards(target: nn.Module) -> None:
    for fqn, module in target.named_modules():
        state = state_of(module)
        if state is not None and state.bound and "forward" in module.__dict__ and not _is_ours(module):
            raise PatchConflictError(
                f"the forward of {fqn} was replaced after patch_model, by something that may call fastft's; undo that "
                "first, then call this again"
            )


def _unbind(module: nn.Module) -> None:
    if not _is_ours(module):
        return
    if _slot(module) == "forward":
        del module.__dict__["forward"]
    else:
        module.__dict__["_old_forward"] = types.MethodType(type(module).forward, module)


# ------------------------------------------------------------------------------------------------- apply and undo


def _apply(target: nn.Module, config: PatchConfig, plan: Plan) -> None:
    from .modules import attention, backbone, checkpointing, decoder, experts, guard, heads, norm

    shared = ModelState(config)
    # A model that fastft has no part in is left as it is, unless it was asked for.
    if config.checkpointing in _MODES or (config.checkpointing == "auto" and plan.bindings):
        budget = Budget(config.memory_budget) if config.checkpointing == "auto" else None
        shared.memory = ActivationMemory(_MODES.get(str(config.checkpointing), RECOMPUTE), budget=budget)
    four_bit = FourBitWeights()
    if config.lora is not False:
        from .integrations.peft import LoRAProjector

        shared.projector = LoRAProjector(by_name=config.lora == "fused", four_bit=four_bit)
    modules = dict(target.named_modules())
    if any(binding.kind in ("backbone", "experts") for binding in plan.bindings):
        attention.register()
        experts.register()
        shared.read_packed = four_bit
        configs.own_configs(target, shared)
    attending = {item.fqn for item in plan.replaced if item.op in ("packing", "attention")}
    for binding in plan.bindings:
        module: Any = modules[binding.fqn]
        names: tuple[str, ...] = ()
        if binding.fqn in attending:
            configs.select_attention(module.config)
        if binding.kind == "experts":
            configs.select_experts(module.config)
            _adopt_adapters(modules, binding.fqn)
        if binding.kind in ("head", "backbone", "guard", "head_guard"):
            names = positional_names(type(module).forward)
        if binding.kind == "head":
            module.register_forward_pre_hook(heads.announce_used_outputs, with_kwargs=True)
            module.register_forward_hook(heads.forget_used_outputs, always_call=True)
        if binding.kind == "backbone":
            module.register_forward_pre_hook(backbone.announce_packing, with_kwargs=True)
            module.register_forward_hook(backbone.finish_packing, with_kwargs=True)
            if config.residual_stream == "autocast":
                module.get_input_embeddings().register_forward_hook(norm.cast_embeddings)
        if binding.kind in ("guard", "head_guard"):
            module.register_forward_pre_hook(guard.guard_packing, with_kwargs=True)
        module.__dict__[ATTRIBUTE] = ModuleState(
            shared, binding.kind, binding.family, names, binding.bind_forward, binding.rules
        )
        if binding.kind == "decoder_layer":
            decoder.fuse(module)
        if binding.bind_forward:
            module.__dict__[_slot(module)] = types.MethodType(_forwards()[binding.kind], module)
    whole = {item.op for item in plan.replaced}
    if "loss" in whole:
        trl_head.bind(pretrained_model(target) or target)
    if "walks" in whole:
        walks.bind(
            pretrained_model(target) or target
        )  # what PEFT puts around it asks it in turn, for all but parameters
    if shared.memory is not None:  # last: it asks which modules of a layer tell what they make
        checkpointing.install(target, shared.memory)


def _memories(target: nn.Module) -> list[ActivationMemory]:
    from .modules import checkpointing

    return checkpointing.memories(target)


def _uninstall_memory(target: nn.Module) -> None:
    from .modules import checkpointing

    checkpointing.uninstall(target)


def _adopt_adapters(modules: dict[str, nn.Module], fqn: str) -> None:
    """PEFT may wrap experts at any time: the layer around them is asked before each of its forwards."""
    from .integrations import peft_experts

    parent = fqn.rpartition(".")[0]
    while peft_experts.is_wrapper(modules[parent]):
        parent = parent.rpartition(".")[0]
    if peft_experts.adopt not in modules[parent]._forward_pre_hooks.values():
        modules[parent].register_forward_pre_hook(peft_experts.adopt)


def _remove_hooks(module: nn.Module) -> None:
    """Removes fastft's hooks by what they are: a handle would not know the hooks of a copied model."""
    from .integrations import peft_experts
    from .modules import backbone, guard, heads, norm

    for hook, hooks, flags in (
        (peft_experts.adopt, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (norm.cast_embeddings, module._forward_hooks, module._forward_hooks_with_kwargs),
        (heads.announce_used_outputs, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (heads.forget_used_outputs, module._forward_hooks, module._forward_hooks_always_called),
        (backbone.announce_packing, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (backbone.finish_packing, module._forward_hooks, module._forward_hooks_with_kwargs),
        (guard.guard_packing, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for key in [key for key, value in hooks.items() if value is hook]:
            del hooks[key]
            flags.pop(key, None)
