"""The model families that fastft knows, found by the exact class of a module."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..family_spec import FamilySpec
from . import granitemoe, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe

FAMILIES: tuple[FamilySpec, ...] = (
    granitemoe.SPEC,
    llama.SPEC,
    mistral.SPEC,
    mixtral.SPEC,
    qwen2.SPEC,
    qwen2_moe.SPEC,
    qwen3.SPEC,
    qwen3_moe.SPEC,
)


class Role(NamedTuple):
    """What a class is within its family: "backbone", "attention", "mlp" or "rms_norm"."""

    family: FamilySpec
    kind: str


@cache
def _roles() -> dict[tuple[str, str], Role]:
    return {
        (family.module, name): Role(family, kind)
        for family in FAMILIES
        for kind in ("backbone", "decoder_layer", "attention", "mlp", "rms_norm")
        if (name := getattr(family, kind)) is not None
    }


def role_of(cls: type) -> Role | None:
    """The role of a class, or None if no family names it. A subclass is another class: it may compute otherwise."""
    return _roles().get((cls.__module__, cls.__qualname__))
