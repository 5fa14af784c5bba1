"""Checked calls: what is left of a call once door and plan are done, and how the next one like it goes straight there.

Knows: which properties of operands decide that a call is valid and what it launches; those make its signature.
Must not: decide what is valid. A call without a known signature takes the long way, which also gives the messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .libraries import known_library_of

# Pointers of the operands, of the results, of the scratch; eps; weight_offset -> the arguments of one launch.
Arguments = Callable[[tuple, list, int, float, float], tuple]


@dataclass(slots=True)
class Checked:
    """A call that has passed the door, compiled: to allocate, fill in pointers and launch is all that is left."""

    library: Any
    makers: tuple[Callable[[], Any] | None, ...]  # of each result, None where it is not wanted
    make_scratch: Callable[[], Any] | None
    steps: tuple[tuple[Callable[[tuple, int], None], Arguments], ...]
    stream: Callable[[], int]
    spans: tuple[tuple[int, int] | None, ...] = ()  # bytes before and behind each operand's pointer
    in_place: tuple[tuple[int, int], ...] = ()  # (result, operand) that may lie on one another exactly

    def run(self, pointers: tuple, given: tuple, workspace: Any, eps: float, weight_offset: float) -> list[Any]:
        """The results in order, None where not wanted."""
        pointer_of = self.library.pointer
        results: list[Any] = []
        at: list[int] = []
        for make, array in zip(self.makers, given):  # noqa: B905  (equally long; strict costs a tenth of a microsecond)
            if make is None:
                results.append(None)
                at.append(0)
                continue
            if array is None:
                array = make()
            results.append(array)
            at.append(pointer_of(array))
        scratch, start = None, 0
        if self.make_scratch is not None:
            scratch = workspace if workspace is not None else self.make_scratch()
            start = known_library_of(scratch).pointer(scratch)
        stream = self.stream()
        for launch, arguments in self.steps:
            launch(arguments(pointers, at, start, eps, weight_offset), stream)
        if workspace is not None or any_given(given):
            for array in (*given, workspace):
                if array is not None:
                    known_library_of(array).written(array)
        del scratch  # alive until the launches that use it are in its stream
        return results


_KNOWN: dict[tuple, Checked] = {}
_MOST = 4096


def any_given(given: tuple) -> bool:
    """Whether the caller brought an array for a result."""
    for array in given:  # noqa: SIM110  (any() with a generator takes twice as long)
        if array is not None:
            return True
    return False


# How an operand's properties are read, by its exact type.
_SIGNATURES: dict[type, Callable[[Any], tuple[tuple, int]]] = {type(None): lambda obj: ((), 0)}


def _reader_of(obj: Any) -> Callable[[Any], tuple[tuple, int]]:
    reader = _SIGNATURES[type(obj)] = known_library_of(obj).signature
    return reader


def signature(options: tuple, operands: tuple, given: tuple, workspace: Any) -> tuple[tuple, tuple] | None:
    """(key, pointers of the operands), or None for a call that can only take the long way."""
    key: list[Any] = [options]
    pointers = []
    try:
        for obj in operands:
            traits, pointer = (_SIGNATURES.get(type(obj)) or _reader_of(obj))(obj)
            key.append(traits)
            pointers.append(pointer)
        if workspace is not None or any_given(given):
            for obj in (*given, workspace):
                key.append(None if obj is None else known_library_of(obj).signature_of_output(obj))
    except Exception:  # sparse, fake, of no library: the long way says what is wrong, if anything is
        return None
    return tuple(key), tuple(pointers)


def find(key: tuple, pointers: tuple, given: tuple, workspace: Any) -> Checked | None:
    """The checked call of that signature, unless its arrays lie on one another in a way that has to be looked at."""
    try:
        checked = _KNOWN.get(key)
    except TypeError:  # an option that cannot be a key
        return None
    if checked is None or (workspace is None and not any_given(given)):
        return checked
    return checked if _apart(checked, pointers, given, workspace) else None


def remember(key: tuple, checked: Checked) -> None:
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    with contextlib.suppress(TypeError):  # an option that cannot be a key
        _KNOWN[key] = checked


def same_layout(given: Any, operand: Any) -> bool:
    """Whether two arrays have their elements at the same places from their pointers on."""
    if given is None or operand is None:
        return False
    (a, _), (b, _) = (known_library_of(obj).signature(obj) for obj in (given, operand))
    return a[1:4] == b[1:4]  # shape, strides, dtype


def _apart(checked: Checked, pointers: tuple, given: tuple, workspace: Any) -> bool:
    """Whether every given result is disjoint from all else, or exactly in place where that is allowed."""
    written = [(index, known_library_of(obj).extent(obj)) for index, obj in enumerate(given) if obj is not None]
    if workspace is not None:
        written.append((-1, known_library_of(workspace).extent(workspace)))
    for position, (index, (low, high)) in enumerate(written):
        for operand, span in enumerate(checked.spans):
            if span is None or low >= pointers[operand] + span[1] or high <= pointers[operand] + span[0]:
                continue
            if low != pointers[operand] or (index, operand) not in checked.in_place:
                return False
        if any(low < other_high and other_low < high for _, (other_low, other_high) in written[:position]):
            return False
    return True
