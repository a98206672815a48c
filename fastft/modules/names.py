"""The name under which fastft's functions are registered with transformers, as a config of a patched model holds it."""

from __future__ import annotations

from typing import Any, Self

NAME = "fastft"


class ImplementationName(str):
    """The value "fastft" of a config's field, which remembers the value it took the place of.

    A config travels: models are built from it, it is copied, pickled, reused. So the memory has to travel inside it.
    A pickle turns into the former value, so that a process without fastft can use it.
    """

    previous: str

    def __new__(cls, previous: str) -> Self:
        name = super().__new__(cls, NAME)
        name.previous = previous
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> ImplementationName:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.previous,)
