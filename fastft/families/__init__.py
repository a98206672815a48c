"""The model families that fastft knows, found by the exact class of a module."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..family_spec import FamilySpec
from . import llama, mistral, qwen2, qwen3

FAMILIES: tuple[FamilySpec, ...] = (llama.SPEC, mistral.SPEC, qwen2.SPEC, qwen3.SPEC)


class Role(NamedTuple):
    """What a class is within its family: "backbone", "attention", "mlp" or "rms_norm"."""

    family: FamilySpec
    kind: str


@cache
def _roles() -> dict[tuple[str, str], Role]:
    return {
        (family.module, getattr(family, kind)): Role(family, kind)
        for family in FAMILIES
        for kind in ("backbone", "attention", "mlp", "rms_norm")
    }


def role_of(cls: type) -> Role | None:
    """The role of a class, or None if no family names it. A subclass is another class: it may compute otherwise."""
    return _roles().get((cls.__module__, cls.__qualname__))
