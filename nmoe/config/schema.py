"""Walks along a key path through a settings schema, to find which keys were possible where an error happened.

Where a table may be one of several sections (a union), these differ in their `type` key, a literal in each.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from nmoe.config.base import Section
from nmoe.config.locate import KeyPath

TAG = "type"


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """Returns the section classes that a value with this annotation may have: none for scalars and arrays, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return sections_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(section for member in get_args(annotation) for section in sections_of(member))
    return ()


def section_for(annotation: Any, value: Any) -> type[Section] | None:
    """Returns the section class for a table, chosen in a union by its `type` key; None if the value is not a table or no class
    has that type."""
    sections = sections_of(annotation)
    if not isinstance(value, dict) or len(sections) < 2:
        return sections[0] if sections and isinstance(value, dict) else None
    return next((section for section in sections if tag_of(section) == value.get(TAG)), None)


def tag_of(section: type[Section]) -> str:
    """Returns the value of the `type` key that identifies this section in a union."""
    return str(get_args(section.model_fields[TAG].annotation)[0])


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Returns the values of a literal annotation, optional or not; empty for any other annotation."""
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return tuple(choice for member in get_args(annotation) for choice in choices_of(member))
    return ()


def follow(schema: type[Section], location: KeyPath) -> tuple[KeyPath, list[Any]]:
    """Converts pydantic's location of an error to a key path, with the annotation at each step.

    In a location, the `type` of one of several possible sections stands between the key and the keys below: `("task_pool", "jsonl",
    "path")` becomes `("task_pool", "path")`. The name of a type stands behind a key with several types, `("run", "resume",
    "bool")`, and is removed too. The list of annotations begins with `schema` itself, so it is one longer than the path; the
    annotation of an unknown key is None.
    """
    path: KeyPath = ()
    annotations: list[Any] = [schema]
    for step in location:
        sections = sections_of(annotations[-1])
        if len(sections) > 1:
            annotations[-1] = next((section for section in sections if tag_of(section) == step), None)
            continue
        if has_several_types(annotations[-1]):
            continue
        path = (*path, step)
        if sections:
            known = sections[0].model_fields.get(str(step))
            annotations.append(known.annotation if known else None)
        else:
            annotations.append(item_of(annotations[-1], step))
    return path, annotations


def has_several_types(annotation: Any) -> bool:
    """Returns whether a value may have one of several types that are neither sections nor arrays: `bool | Literal["auto"]`."""
    if get_origin(annotation) is Annotated:
        return has_several_types(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return False
    members = [member for member in get_args(annotation) if member is not NoneType]
    return len(members) > 1 and not any(sections_of(member) or get_origin(member) is tuple for member in members)


def item_of(annotation: Any, index: str | int) -> Any:
    """Returns the annotation of an array's item with this index; None if the annotation is not an array, or has no such item."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        arrays = [member for member in get_args(annotation) if member is not NoneType]
        return item_of(arrays[0], index)
    if get_origin(annotation) is not tuple:
        return None
    items = get_args(annotation)
    if items[-1] is Ellipsis:
        return items[0]
    return items[index] if isinstance(index, int) and index < len(items) else None


def keys_of(annotation: Any) -> list[str]:
    """Returns the keys that a table with this annotation may have, in the order of their documentation."""
    return list(dict.fromkeys(key for section in sections_of(annotation) for key in section.model_fields))


def description_of(section: type[Section], key: str) -> str:
    """Returns the description of a key: the `description` of its field, else the docstring under it, in the section or its
    nearest base."""
    if (written := section.model_fields[key].description) is not None:
        return written
    documented = (_documented(base.__module__).get(base.__name__, {}) for base in section.__mro__ if base is not object)
    return next((keys[key] for keys in documented if key in keys), "")


@functools.cache
def _documented(module: str) -> Mapping[str, Mapping[str, str]]:
    """Returns the docstrings under the attributes of each class of a module: class name, then attribute name, to docstring."""
    classes = (
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    )
    return {
        one.name: {
            key.target.id: " ".join(text.split())
            for key, below in pairwise(one.body)
            if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(text := below.value.value, str)
        }
        for one in classes
    }


def paths_of(schema: type[Section], in_arrays: bool = False) -> Iterator[tuple[str, ...]]:
    """Yields the path of every key of the schema, tables included. With `in_arrays` also the keys of tables in arrays, without
    indices."""
    for key, known in schema.model_fields.items():
        yield (key,)
        items = sections_of(item_of(known.annotation, 0)) if in_arrays else ()
        for section in (*sections_of(known.annotation), *items):
            for path in paths_of(section, in_arrays):
                yield (key, *path)


def default_of(schema: type[Section], key: str) -> Any:
    """Returns the default of a key with dots, `eval.0.every_steps`; None if it is required, unknown, or of a union of sections."""
    annotation: Any = schema
    parts = key.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            annotation = item_of(annotation, int(part))
            continue
        sections = sections_of(annotation)
        if len(sections) != 1 or (field := sections[0].model_fields.get(part)) is None:
            return None
        if index == len(parts) - 1:
            return None if field.is_required() else field.default
        annotation = field.annotation
    return None
