"""What becomes of each module of a model.

A plan is made by looking, without changing anything. An option that was named explicitly and cannot be honoured
raises here, before the model is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from . import structure
from .capability import Verdict, probe
from .choices import choose
from .config import PatchConfig
from .errors import UnsupportedOptionError
from .families import role_of
from .family_spec import FamilySpec
from .integrations.bitsandbytes import FourBitWeights
from .integrations.peft_experts import is_wrapper, wrapped_experts
from .integrations.trl_head import why_not_served
from .isolation import mixers
from .memory.machine import offload_verdict
from .modules import decoder
from .modules.activation import activation_of
from .modules.expert_layout import asks_interface, inherits_interface, why_not_experts
from .modules.names import NAME
from .modules.state import BackboneRules
from .ops.selection import AUTO, Choice

# What the forward bound onto a module of each kind computes.
_OPS_OF_FORWARD = {"attention": ("rope", "lora"), "mlp": ("gated_mlp", "lora"), "rms_norm": ("rms_norm",)}
# The projections that forward calls, where PEFT may put an adapter at any time.
_PROJECTIONS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
# The forward is bound all the same: it asks for adapters at each call.
NO_ADAPTER = "no adapter yet; fused when PEFT adds one"


@dataclass(frozen=True, slots=True)
class Replacement:
    """An op of a module that fastft computes: where, with what, and why."""

    fqn: str
    op: str
    impl: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """An op of a module that stays stock, and why."""

    fqn: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class Binding:
    """A module that will carry fastft's state, and the forward to bind onto it if any."""

    fqn: str
    kind: str  # "head", "backbone", "guard", "head_guard", "decoder_layer", "attention", "mlp", "rms_norm",
    # "experts", "expert_adapter"
    family: FamilySpec | None
    bind_forward: bool
    rules: BackboneRules | None = None  # of a backbone or guard


@dataclass(frozen=True, slots=True)
class Plan:
    """What `patch_model` will do to a model."""

    bindings: tuple[Binding, ...]
    replaced: tuple[Replacement, ...]
    skipped: tuple[Skipped, ...]


def make_plan(
    model: nn.Module, config: PatchConfig, already_bound: frozenset[str] = frozenset(), *, strict: bool = True
) -> Plan:
    """Looks at every module of `model` and decides.

    Args:
        model: the model, unwrapped.
        config: what was asked for.
        already_bound: names of modules whose instance forward is fastft's own.
        strict: raise for what was named explicitly and cannot be honoured; a report notes it instead.

    Raises:
        UnsupportedOptionError: an option named explicitly that a module cannot honour.
    """
    planner = _Planner(model, config, strict)
    for fqn, module in model.named_modules():
        planner.visit(fqn, module, taken="forward" in module.__dict__ and fqn not in already_bound)
    planner.finish()
    return Plan(tuple(planner.bindings), tuple(planner.replaced), tuple(planner.skipped))


class _Planner:
    """Gathers the decisions over the modules of one model."""

    def __init__(self, model: nn.Module, config: PatchConfig, strict: bool) -> None:
        self.name = type(structure.pretrained_model(model) or model).__name__
        self.model = model
        self.config = config
        self.strict = strict
        self.read_packed = FourBitWeights()
        self.bindings: list[Binding] = []
        self.replaced: list[Replacement] = []
        self.skipped: list[Skipped] = []
        self.layers: list[tuple[str, nn.Module, FamilySpec, bool]] = []
        self.backbones = _backbones(model, config)  # name -> (family, why it is not packed)
        self.interface_attention = {  # modules below packed backbones that ask transformers' AttentionInterface
            f"{fqn}.{inner}".strip(".")
            for fqn, (_, problem) in self.backbones.items()
            if not problem
            for inner in structure.interface_attention(model.get_submodule(fqn))
        }

    def visit(self, fqn: str, module: nn.Module, taken: bool) -> None:
        if fqn in self.backbones:
            self._backbone(fqn, module)
        role = role_of(decoder.layer_class(module))
        if role is not None and role.kind == "decoder_layer":
            self.layers.append((fqn, module, role.family, taken))
        elif role is not None and role.kind != "backbone":
            self._known(fqn, module, role.kind, role.family, taken)
        elif fqn in self.interface_attention:
            self._replace(fqn, "attention", module, None)
            self.bindings.append(Binding(fqn, "attention", None, False))
        elif asks_interface(module):
            self._experts(fqn, module)
        elif inherits_interface(module):
            self._decide(fqn, "experts", module, None, "its class has a forward of its own over that of another one")
        elif wrapped_experts(module) is not None:
            self._expert_adapter(fqn, module, taken)

    def finish(self) -> None:
        """Accounts for the ops that no module has, and refuses what was named explicitly and left out."""
        self._layers()
        seen = {item.op for item in self.replaced} | {item.op for item in self.skipped}
        for op in ("packing", "attention", "rope", "rms_norm", "add_rms_norm", "gated_mlp", "lora"):
            if op not in seen:
                off = getattr(self.config, op) is False
                unknown = f"{self.name} belongs to no family that fastft knows"
                if op == "add_rms_norm" and "rms_norm" in seen:
                    unknown = f"{self.name} has no decoder layers of a class that fastft fuses"
                self._skip("", op, f"{op}=False" if off else unknown)
        if "experts" not in seen and self.config.experts not in (AUTO, False):
            self._skip("", "experts", f"nothing in {self.name} asks transformers' experts interface")
        self._loss()
        for left in self.skipped if self.strict else ():
            requested = getattr(self.config, left.op)
            if requested not in (AUTO, False) and left.reason != NO_ADAPTER:
                where = f" for {left.fqn}" if left.fqn else ""
                raise UnsupportedOptionError(
                    f"{left.op}={requested!r} cannot be honoured{where}: {left.reason}; "
                    f"use {left.op}='auto' or {left.op}=False"
                )
        self._checkpointing()
        if self.config.walks is False:
            self._skip("", "walks", "walks=False")
        elif self.replaced:
            reason = (
                "train(), parameters() and num_parameters() of the pretrained model, of which a trainer's step is full"
            )
            self.replaced.append(Replacement("", "walks", "direct", reason))

    def _loss(self) -> None:
        """Of the head, which is asked for through the whole model."""
        whole = structure.pretrained_model(self.model) or self.model
        problem = "loss=False" if self.config.loss is False else why_not_served(whole)
        if not self.replaced and self.config.loss == AUTO:
            return  # a model that has no other part is left as it is
        if not self.bindings:
            problem = problem or "no other part of the model is patched"
        if problem:
            self._skip("", "loss", problem)
        else:
            self._replace("", "loss", whole, None)

    def _layers(self) -> None:
        """All of a model's layers or none: FSDP wraps those that are of the class which it finds first by its name."""
        problems = [decoder.why_not_fusable(decoder.layer_class(module)) for _, module, _, _ in self.layers]
        if self.config.rms_norm is False:
            problems.append("rms_norm=False")
        if any(taken for *_, taken in self.layers):
            problems.append("something else replaced a layer's forward already (accelerate's device hooks do)")
        problem = next(filter(None, problems), "")
        for fqn, module, family, _ in self.layers:
            self._decide(fqn, "add_rms_norm", module, family, problem)
            if not problem and self.config.add_rms_norm is not False:
                self.bindings.append(Binding(fqn, "decoder_layer", family, False))

    def _checkpointing(self) -> None:
        """Not refused where it cannot be honoured: the model may move to its GPU after patching."""
        if self.config.checkpointing != "offload":
            return
        weight = next(self.model.parameters(), None)
        if weight is None or weight.device.type == "meta":
            verdict = Verdict(True, "decided when the weights have a device")
        else:
            verdict = offload_verdict(probe(weight.device))
        if verdict:
            reason = f"layer inputs, when checkpointing is switched on; {verdict.reason}"
            self.replaced.append(Replacement("", "checkpointing", "offload", reason))
        else:
            self._skip("", "checkpointing", f"layer inputs stay where they are: {verdict.reason}")

    def _backbone(self, fqn: str, module: nn.Module) -> None:
        family, problem = self.backbones[fqn]
        if problem:
            self._refuse_unpad(fqn, problem)
            self._guard(fqn, module, family, problem)
            if family is None:
                self._skip(fqn, "attention", problem)
            return
        head = structure.head_over(self.model, module)
        stays = "unpad=False" if self.config.unpad is False else structure.why_padding_stays(module)
        self._refuse_unpad(fqn, stays or structure.why_promise_fails(self.model))
        if head is None and self.config.unpad is not True:
            stays = stays or "no head of which fastft knows the outputs it uses"
        when = (
            "where nothing is used there"
            if self.config.unpad is True
            else "in training, where the loss uses no output there"
        )
        reason = "boundaries from the collator, from positions that restart, or given; padding is " + (
            f"kept: {stays}" if stays else f"dropped {when}"
        )
        self.replaced.append(Replacement(fqn, "packing", "varlen", reason))
        rules = BackboneRules(keeps_padding=stays, carries_state=bool(mixers(module)))
        self.bindings.append(Binding(fqn, "backbone", family, False, rules))
        if head is not None and not stays:
            self.bindings.append(Binding(head, "head", family, False))

    def _refuse_unpad(self, fqn: str, problem: str) -> None:
        if self.config.unpad is True and problem and self.strict:
            raise UnsupportedOptionError(
                f"unpad=True cannot be honoured for {fqn or self.name}: {problem}; use unpad='auto'"
            )

    def _guard(self, fqn: str, module: Any, family: FamilySpec | None, problem: str) -> None:
        """A backbone that is left to its own code must not mix the documents of a packed row without a word."""
        if self.config.packing is False or not structure.reads_causally(self.model, module):
            self._skip(fqn, "packing", problem)
            return
        refused = structure.why_documents_meet(module)
        if not refused:
            consequence = "its own masks keep the documents of a packed row apart"
        elif refused == problem:
            consequence = "a packed batch is refused"
        else:
            consequence = f"a packed batch is refused: {refused}"
        self._skip(fqn, "packing", f"{problem}; {consequence}")
        rules = BackboneRules(refuses_packing=refused, implementation=module.config._attn_implementation)
        self.bindings.append(Binding(fqn, "guard", family, False, rules))
        head = structure.pretrained_model(self.model)
        if head is not None and head is not module:  # some heads keep positions and boundaries to themselves
            name = next(name for name, candidate in self.model.named_modules() if candidate is head)
            self.bindings.append(Binding(name, "head_guard", family, False, rules))

    def _known(self, fqn: str, module: nn.Module, kind: str, family: FamilySpec, taken: bool) -> None:
        before = len(self.replaced)
        if kind == "attention":
            self._decide(fqn, "attention", module, family, self._why_no_attention(fqn))
        through_registry = len(self.replaced) - before
        problem = structure.why_not_bindable(module, kind, family)
        if taken:
            problem = "something else replaced this module's forward already (accelerate's device hooks do)"
        for op in _OPS_OF_FORWARD[kind]:
            unknown = op == "gated_mlp" and not problem and activation_of(module.act_fn) is None
            own = f"its activation is a {type(module.act_fn).__name__}" if unknown else ""
            self._decide(fqn, op, module, family, problem or own)
        bound = not problem and any(getattr(self.config, op) is not False for op in _OPS_OF_FORWARD[kind])
        if bound or through_registry:
            self.bindings.append(Binding(fqn, kind, family, bound))

    def _experts(self, fqn: str, module: Any) -> None:
        """Whatever the family: transformers' interface says all there is to know."""
        before = len(self.replaced)
        problem = why_not_experts(module, self.read_packed)
        name = getattr(module.config, "_experts_implementation", None)
        if name == NAME and type(name) is str:
            problem = f'the model was loaded with experts_implementation="{NAME}"; load it with another one or none'
        self._decide(fqn, "experts", module, None, problem)
        if len(self.replaced) > before:
            self.bindings.append(Binding(fqn, "experts", None, False))

    def _expert_adapter(self, fqn: str, module: Any, taken: bool) -> None:
        """PEFT's wrappers lie in one another: the outermost speaks for all."""
        if is_wrapper(self.model.get_submodule(fqn.rpartition(".")[0])):
            return
        problem = "something else replaced this wrapper's forward already" if taken else ""
        if self.config.experts is False or why_not_experts(wrapped_experts(module), self.read_packed):
            problem = "its experts stay stock"
        before = len(self.replaced)
        self._decide(fqn, "lora", module, None, problem)
        if len(self.replaced) > before:
            self.bindings.append(Binding(fqn, "expert_adapter", None, True))

    def _why_no_attention(self, fqn: str) -> str:
        """Attention asks the registry whatever the module's forward is, but only a packed backbone feeds it."""
        above = [name for name in self.backbones if not name or fqn.startswith(f"{name}.")]
        if not above:
            return "not below a backbone that fastft packs"
        return self.backbones[max(above, key=len)][1]

    def _decide(self, fqn: str, op: str, module: nn.Module, family: FamilySpec | None, problem: str) -> None:
        if getattr(self.config, op) is False:
            self._skip(fqn, op, f"{op}=False")
        elif problem:
            self._skip(fqn, op, problem)
        else:
            self._replace(fqn, op, module, family)

    def _replace(self, fqn: str, op: str, module: nn.Module, family: FamilySpec | None) -> None:
        requested = getattr(self.config, "rms_norm" if op == "add_rms_norm" else op)
        try:
            choice = choose(op, requested, module, self.read_packed)
        except UnsupportedOptionError as error:
            if self.strict:
                raise
            choice = Choice(requested, f"raises when it runs: {error}")
        reason = choice.reason
        if op == "attention" and family is None:
            reason = f"through transformers' AttentionInterface, family unknown; {reason}"
        if op == "lora" and family is not None:
            adapted, projections = _count_adapted(module)
            if not adapted:
                self._skip(fqn, op, NO_ADAPTER)
                return
            reason = f"{adapted} of {projections} projections have an adapter; {reason}"
        self.replaced.append(Replacement(fqn, op, choice.impl, reason))

    def _skip(self, fqn: str, op: str, reason: str) -> None:
        self.skipped.append(Skipped(fqn, op, reason))


def _backbones(model: nn.Module, config: PatchConfig) -> dict[str, tuple[FamilySpec | None, str]]:
    """The backbones of a model by name, each with its family and the reason why it is not packed ("" if it is)."""
    found: dict[str, tuple[FamilySpec | None, str]] = {}
    for fqn, module in model.named_modules():
        role = role_of(type(module))
        if role is not None and role.kind == "backbone":
            as_shipped = _is_as_shipped(module, role.family)
            problem = structure.why_window_is_lost(module) if as_shipped else structure.why_not_packable(module)
            found[fqn] = (role.family, _why_not_packed(module, config, problem))
    decoder = None if found else structure.find_decoder(model)
    if decoder is not None:
        fqn, module = decoder
        whole = structure.pretrained_model(model)
        if getattr(getattr(whole, "config", None), "is_encoder_decoder", False):
            problem = "encoder-decoder models are not packed"
        else:
            problem = structure.why_not_packable(module)
        found[fqn] = (None, _why_not_packed(module, config, problem))
    return found


def _is_as_shipped(backbone: Any, family: FamilySpec) -> bool:
    """Whether each layer of a known backbone has the family's own attention, not one that somebody put in its place."""
    roles = [role_of(type(module)) for module in backbone.modules()]
    own = sum(role is not None and role.kind == "attention" and role.family is family for role in roles)
    return own == len(backbone.layers)


def _why_not_packed(backbone: Any, config: PatchConfig, problem: str) -> str:
    if config.packing is False:
        return "packing=False"
    name = getattr(backbone.config, "_attn_implementation", None)
    if name == "fastft" and type(name) is str:
        return (
            'the model was loaded with attn_implementation="fastft", which leaves no implementation for batches that '
            "are not packed; load it with another one or none"
        )
    return problem


def _count_adapted(module: nn.Module) -> tuple[int, int]:
    """How many of the projections of an attention or MLP module are LoRA layers now, and how many there are."""
    role = role_of(type(module))
    projections = [getattr(module, name) for name in _PROJECTIONS[role.kind]] if role is not None else []
    return sum(hasattr(projection, "lora_A") for projection in projections), len(projections)
