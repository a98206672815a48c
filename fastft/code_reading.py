"""Reads the code of a function: the names and keywords in it."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any


def uses_keywords(function: Callable[..., Any]) -> bool:
    """Whether a function takes any keyword argument, and its code reads what it took."""
    function = inspect.unwrap(function)
    kinds = {parameter.kind: name for name, parameter in inspect.signature(function).parameters.items()}
    keywords = kinds.get(inspect.Parameter.VAR_KEYWORD)
    if keywords is None:
        return False
    # Newer Pythons load two variables by one instruction.
    read = (i.argval for i in dis.get_instructions(function) if i.opname.startswith("LOAD_"))
    return any(keywords in value if isinstance(value, tuple) else keywords == value for value in read)


def words_of(function: Callable[..., Any]) -> frozenset[str]:
    """Every name and string in the compiled code of a function, below its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset() if code is None else frozenset(_words_of_code(code))


def _words_of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words_of_code(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):  # the keywords of a call
            yield from (word for word in constant if isinstance(word, str))


def keywords_of_calls(function: Callable[..., Any]) -> list[set[str]] | None:
    """The keywords of every call in the source of a function, and the keys of every dictionary that may become some;
    None if the source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # built otherwise, or shipped without it
        return None
    found: list[set[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.append({keyword.arg for keyword in node.keywords if keyword.arg})
        elif isinstance(node, ast.Dict):
            keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
            found.append({key for key in keys if isinstance(key, str)})
    return found
