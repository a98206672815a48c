"""Real text of natural lengths that every Python brings along: questions and answers from its standard library."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Iterator
from types import ModuleType

MODULES = (
    "argparse",
    "array",
    "base64",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "email.message",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "os.path",
    "pathlib",
    "pprint",
    "queue",
    "random",
    "re",
    "shutil",
    "socketserver",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "urllib.parse",
    "uuid",
    "zipfile",
)
# Shorter ones ("See help(type(self)).", "x.__len__()") carry no answer.
MINIMUM_CHARACTERS = 40


def docstring_pairs(limit: int = 500, seed: int = 0) -> list[dict[str, str]]:
    """Questions about the Python standard library, answered by its own docstrings.

    Args:
        limit: the most pairs to return; there are about a thousand, depending on the Python version.
        seed: of the shuffle. The same Python version, limit and seed give the same list.

    Returns:
        Dicts with `instruction` (the question) and `output` (the docstring), in shuffled order.
    """
    pairs = list(_all_pairs())
    random.Random(seed).shuffle(pairs)
    return pairs[:limit]


def as_messages(pair: dict[str, str]) -> list[dict[str, str]]:
    """A pair as the two turns of a conversation, the form that chat templates take."""
    return [
        {"role": "user", "content": pair["instruction"]},
        {"role": "assistant", "content": pair["output"]},
    ]


def _all_pairs() -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for path, thing in _public_things(module, name):
            text = _own_docstring(thing)
            # One docstring is often shared by a name and its alias: a model asked both would meet the answer twice.
            if text and len(text) >= MINIMUM_CHARACTERS and text not in seen:
                seen.add(text)
                yield {"instruction": _question(path, thing), "output": text}


def _public_things(module: ModuleType, name: str) -> Iterator[tuple[str, object]]:
    for attribute, value in sorted(vars(module).items()):
        if attribute.startswith("_") or not (inspect.isclass(value) or callable(value)):
            continue
        if getattr(value, "__module__", name) not in (name, f"_{name}", *_private_homes(name)):
            continue
        yield f"{name}.{attribute}", value
        if inspect.isclass(value):
            for member, function in sorted(vars(value).items()):
                if not member.startswith("_"):
                    yield f"{name}.{attribute}.{member}", function


def _private_homes(name: str) -> tuple[str, ...]:
    """Where CPython keeps what some public modules only re-export."""
    return {
        "datetime": ("_pydatetime",),
        "decimal": ("_pydecimal",),
        "json": ("json.decoder", "json.encoder"),
        "os.path": ("posixpath", "ntpath", "genericpath", "posix", "nt"),
        "io": ("_io",),
        "pathlib": ("pathlib._local", "pathlib._abc"),
        "queue": ("_queue",),
        "collections": ("_collections_abc",),
        "threading": ("_thread",),
    }.get(name, ())


def _own_docstring(thing: object) -> str | None:
    # `inspect.getdoc` would add the docstring of a base class or, for an instance, of its type.
    text = getattr(thing, "__doc__", None)
    return inspect.cleandoc(text) if isinstance(text, str) else None


def _question(path: str, thing: object) -> str:
    return f"What is `{path}` for?" if inspect.isclass(thing) else f"What does `{path}` do?"
