"""The codec: typed messages as msgpack-able lists, and back. It accepts plain values only.

A message is a frozen dataclass, or a NamedTuple where one is sent for every trajectory. On the wire
it is a list of two: the name of its class, and the list of its fields in order. `Codec.decode`
checks the name, the number of fields and the type of each.

`Codec` generates the functions of a class from its annotations, as `dataclasses` does. A host sends
thousands of messages a second, and a walk over the annotations costs four times as much.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from tianflow.errors import BrokenChannelError

C = TypeVar("C", bound=type)
_SCALARS: dict[object, tuple[type, ...]] = {
    bool: (bool,),
    bytes: (bytes,),
    float: (float, int, bool),
    int: (int,),
    str: (str,),
}
"""What msgpack returns for each scalar annotation. A statistic may be a whole number or a flag."""


class Codec:
    """Encodes and decodes the classes of one family, by the name of the class.

    Args:
        family: what the classes are, for error messages ("message").
        families: codecs of base classes: a field that is annotated with such a base class holds an
            instance of any class of that codec.
    """

    def __init__(self, family: str, families: Mapping[type, Codec] | None = None) -> None:
        self._family, self._families = family, dict(families or {})
        self._classes: dict[str, type] = {}
        self._encoders: dict[type, Callable[[Any], object] | None] = _Made(self._make_encoder)
        """None for a class that msgpack packs as it is."""
        self._decoders: dict[str, Callable[[Any], Any]] = _Made(self._make_decoder)

    @property
    def classes(self) -> tuple[type, ...]:
        """The registered classes."""
        return tuple(self._classes.values())

    def register(self, cls: C) -> C:
        """Register ``cls``, a frozen dataclass or a NamedTuple. Works as a decorator."""
        if self._classes.setdefault(cls.__name__, cls) is not cls:
            raise ValueError(f"two classes of {self._family}s are called {cls.__name__!r}")
        return cls

    def encode(self, value: object) -> tuple[str, object]:
        """What msgpack packs for ``value``. KeyError if its class is not registered."""
        cls = type(value)
        encode = self._encoders[cls]
        return cls.__name__, value if encode is None else encode(value)

    def decode(self, values: Any) -> Any:
        """The inverse of `encode`, for what msgpack unpacked.

        Raises:
            BrokenChannelError: the name, the number of fields or the type of a field is wrong.
        """
        try:
            name, fields_ = values
            decoder = self._decoders[name]
        except (KeyError, TypeError, ValueError):
            raise BrokenChannelError(
                f"{values!r:.80} is not the name of a known {self._family} and its fields"
            ) from None
        return decoder(fields_)

    def _make_encoder(self, cls: type) -> Callable[[Any], object] | None:
        if self._classes.get(cls.__name__) is not cls:
            raise KeyError(cls)
        return None if _packs(cls, self._families) else _encoder(cls, self._families)

    def _make_decoder(self, name: str) -> Callable[[Any], Any]:
        return _decoder(self._classes[name], self._families)


class _Made(dict[Any, Any]):
    """A dictionary that makes a missing value from its key, once."""

    def __init__(self, make: Callable[[Any], object]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> object:
        self[key] = made = self._make(key)
        return made


def _record_fields(cls: Any) -> dict[str, Any]:
    """Name and annotation of each field of a dataclass or NamedTuple, in order."""
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else cls._fields
    hints = get_type_hints(cls)
    return {name: hints[name] for name in names}


def _is_record(annotation: object) -> bool:
    return isinstance(annotation, type) and (
        is_dataclass(annotation) or hasattr(annotation, "_fields")
    )


def _without_none(annotation: object) -> object:
    """The other member of ``X | None``; None for every other annotation."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return None
    members = [member for member in get_args(annotation) if member is not types.NoneType]
    if len(members) != 1 or len(get_args(annotation)) != 2:
        raise TypeError(f"{annotation} cannot be sent: the only union is with None")
    return members[0]


# Encoding
# --------------------------------------------------------------------------------------------------


def _encoder(cls: type, families: Mapping[type, Codec]) -> Callable[[Any], object]:
    """A function from an instance of ``cls`` to what msgpack packs."""
    scope: dict[str, object] = {}
    values = [
        _encoding(annotation, f"it.{field}", scope, families)
        for field, annotation in _record_fields(cls).items()
    ]
    return _function("encode", [f"return ({''.join(f'{value}, ' for value in values)})"], scope)


def _encoding(
    annotation: object, value: str, scope: dict[str, object], families: Mapping[type, Codec]
) -> str:
    """An expression that encodes ``value``, itself an expression."""
    if _packs(annotation, families):
        return value
    if annotation is Path:
        return f"str({value})"
    if annotation in families:
        return f"{_bound(scope, families[annotation].encode)}({value})"  # type: ignore[index]  # a key
    if (inner := _without_none(annotation)) is not None:
        return f"(None if {value} is None else {_encoding(inner, value, scope, families)})"
    if _is_record(annotation):
        return f"{_bound(scope, _encoder(annotation, families))}({value})"  # type: ignore[arg-type]  # a class
    inner = get_args(annotation)
    if get_origin(annotation) is tuple:
        return f"[{_encoding(inner[0], 'item', scope, families)} for item in {value}]"
    return (
        f"{{key: {_encoding(inner[1], 'item', scope, families)} for key, item in {value}.items()}}"
    )


def _packs(annotation: object, families: Mapping[type, Codec]) -> bool:
    """True if msgpack packs values of ``annotation`` as they are. Raises TypeError if none can be
    sent.
    """
    if annotation is Any or annotation in _SCALARS or get_origin(annotation) is Literal:
        return True
    if annotation is Path or annotation in families:
        return False
    if (inner := _without_none(annotation)) is not None:
        return _packs(inner, families)
    if _is_record(annotation):
        members = _record_fields(annotation).values()
        packed = [_packs(member, families) for member in members]  # each is checked
        return all(packed) and not is_dataclass(annotation)
    match get_origin(annotation), get_args(annotation):
        case origin, (item, rest) if origin is tuple and rest is Ellipsis:
            return _packs(item, families)
        case origin, (key, item) if origin in (dict, Mapping) and key in (str, int):
            return _packs(item, families)
    raise TypeError(f"{annotation} cannot be sent")


# Decoding
# --------------------------------------------------------------------------------------------------


def _decoder(cls: Any, families: Mapping[type, Codec]) -> Callable[[Any], Any]:
    """A function from what msgpack unpacked to an instance of ``cls``."""
    scope: dict[str, object] = {"new": tuple.__new__, "refuse": _refuse}
    lines = _record_decoding(cls, "it", "v", scope, families)
    return _function("decode", [*lines, "return it"], scope)


def _record_decoding(
    cls: Any, value: str, prefix: str, scope: dict[str, object], families: Mapping[type, Codec]
) -> list[str]:
    """Statements that replace the variable ``value`` by an instance of ``cls``. Records within it
    are decoded in line, because a call costs as much as the decoding of two numbers.
    """
    hints = _record_fields(cls)
    names = [f"{prefix}{index}" for index in range(len(hints))]
    every = "".join(f"{name}, " for name in names)
    made = _bound(scope, cls)
    lines = [
        f"if type({value}) is not list or len({value}) != {len(hints)}:",
        f"    refuse({cls.__name__!r}, {value}, '{len(hints)} fields')",
        f"({every}) = {value}",
    ]
    for name, (field, annotation) in zip(names, hints.items(), strict=True):
        lines += _decoding(annotation, name, f"{cls.__name__}.{field}", scope, families)
    create = f"{made}({every})" if is_dataclass(cls) else f"new({made}, ({every}))"
    return [*lines, f"{value} = {create}"]


def _decoding(
    annotation: object,
    value: str,
    where: str,
    scope: dict[str, object],
    families: Mapping[type, Codec],
) -> list[str]:
    """Statements that check the variable ``value`` and replace it by what it stands for."""

    def check(condition: str, expected: str) -> list[str]:
        return [f"if {condition}:", f"    refuse({where!r}, {value}, {expected!r})"]

    if annotation is Any:
        return []
    if annotation in _SCALARS or annotation is Path:
        kinds = _SCALARS[str if annotation is Path else annotation]
        wrong = " and ".join(f"type({value}) is not {kind.__name__}" for kind in kinds)
        path = [f"{value} = {_bound(scope, Path)}({value})"] if annotation is Path else []
        return [*check(wrong, kinds[0].__name__), *path]
    if get_origin(annotation) is Literal:
        words = get_args(annotation)
        known = _bound(scope, frozenset(words))
        return check(f"type({value}) is not str or {value} not in {known}", f"one of {words}")
    if annotation in families:
        return [f"{value} = {_bound(scope, families[annotation].decode)}({value})"]  # type: ignore[index]  # a key
    if (inner := _without_none(annotation)) is not None:
        return [
            f"if {value} is not None:",
            *(f"    {line}" for line in _decoding(inner, value, where, scope, families)),
        ]
    if _is_record(annotation):
        return _record_decoding(annotation, value, f"{value}_", scope, families)
    if get_origin(annotation) is tuple:
        item = get_args(annotation)[0]
        found, made = _items(item, value, where, scope, families)
        return [*check(f"type({value}) is not list{found}", "list"), f"{value} = tuple({made})"]
    key, item = get_args(annotation)
    found, made = _items(item, f"{value}.values()", where, scope, families)
    keys = _bound(scope, frozenset(_SCALARS[key]))
    lines = check(f"type({value}) is not dict or not {keys}.issuperset(map(type, {value}))", "dict")
    if found:
        lines += check(found.removeprefix(" or "), f"dict of {item}")
    elif made != f"{value}.values()":
        lines.append(f"{value} = dict(zip({value}, {made}))")
    return lines


def _items(
    item: object,
    values: str,
    where: str,
    scope: dict[str, object],
    families: Mapping[type, Codec],
) -> tuple[str, str]:
    """How the items of a container are checked and made: a condition that holds if a scalar item
    has the wrong type, and an expression for the items.
    """
    if item is Any:
        return "", values
    if item in _SCALARS:
        kinds = _bound(scope, frozenset(_SCALARS[item]))
        return f" or not {kinds}.issuperset(map(type, {values}))", values
    if _is_record(item):
        return "", f"map({_bound(scope, _decoder(item, families))}, {values})"
    inner: dict[str, object] = {"refuse": _refuse}
    lines = _decoding(item, "it", f"an item of {where}", inner, families)
    return "", f"map({_bound(scope, _function('decode', [*lines, 'return it'], inner))}, {values})"


def _refuse(where: str, value: object, expected: str) -> NoReturn:
    raise BrokenChannelError(f"{where} is {value!r:.80} in a message, expected: {expected}")


# Generating
# --------------------------------------------------------------------------------------------------


def _bound(scope: dict[str, object], value: object) -> str:
    """A name for ``value`` in ``scope``."""
    name = f"x{len(scope)}"
    scope[name] = value
    return name


def _function(name: str, lines: Iterable[str], scope: dict[str, object]) -> Callable[[Any], Any]:
    """The function ``name`` of one argument, ``it``, with ``lines`` as its body."""
    source = "\n".join([f"def {name}(it):", *(f"    {line}" for line in lines)])
    exec(source, scope)  # noqa: S102 - generated from annotations of this package, as dataclasses does
    made: Callable[[Any], Any] = scope[name]  # type: ignore[assignment]  # the source defines it
    return made
