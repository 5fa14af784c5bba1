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
    index: int  # of the device
    current: Callable[[], int]  # the index of the device that is current in this thread
    switch: Callable[[int], Any]  # a context in which another one is
    makers: tuple[Callable[[], Any] | None, ...]  # of each result, None where it is not wanted
    make_scratch: Callable[[], Any] | None
    steps: tuple[tuple[Callable[[tuple, int], None], Arguments], ...]
    stream: Callable[[], int]
    eps: float = 0.0  # what None means
    spans: tuple[tuple[int, int] | None, ...] = ()  # bytes before and behind each operand's pointer
    in_place: tuple[tuple[int, int], ...] = ()  # (result, operand) that may lie on one another exactly
    guard: Callable[..., bool] | None = None  # whether other arrays have these ones' properties, if one call can tell

    def run(self, pointers: Any, given: tuple | None, workspace: Any, eps: float, weight_offset: float) -> list[Any]:
        """The results in order, None where not wanted. `given`: the caller's arrays for them, None where there is none;
        None where there are none at all."""
        if self.current() != self.index:
            with self.switch(self.index):
                return self.run(pointers, given, workspace, eps, weight_offset)
        pointer_of = self.library.pointer
        results: list[Any] = []
        at: list[int] = []
        for make in self.makers:
            if make is None:
                results.append(None)
                at.append(0)
                continue
            array = None if given is None else given[len(at)]
            if array is None:
                array = make()
            results.append(array)
            at.append(pointer_of(array))
        scratch, start = None, 0
        if self.make_scratch is not None:
            scratch = self.make_scratch() if workspace is None else workspace
            start = known_library_of(scratch).pointer(scratch)
        stream = self.stream()
        for launch, arguments in self.steps:
            launch(arguments(pointers, at, start, eps, weight_offset), stream)
        if given is not None or workspace is not None:
            for array in (*(given or ()), workspace):
                if array is not None:
                    known_library_of(array).written(array)
        del scratch  # alive until the launches that use it are in its stream
        return results


# By signature, the checked call; by options alone, the latest of those that a guard recognises without a signature.
_KNOWN: dict[tuple, Any] = {}
_MOST = 4096
_LATEST = 4

# How an operand's properties are read, by its exact type.
_SIGNATURES: dict[type, Callable[[Any], tuple[tuple, int]]] = {type(None): lambda obj: ((), 0)}


def _reader_of(obj: Any) -> Callable[[Any], tuple[tuple, int]]:
    reader = _SIGNATURES[type(obj)] = known_library_of(obj).signature
    return reader


def find(options: tuple, operands: tuple, given: tuple | None, workspace: Any) -> tuple[Checked | None, Any, Any]:
    """(the checked call of this signature, the operands' pointers, the signature if it was made).

    `options` say also which of the arrays are there. No call comes back where none is known, or where the caller's
    results lie on other arrays in a way that has to be looked at. No signature: only the long way is left.
    """
    try:
        latest = _KNOWN.get(options)
        if latest is not None:
            found = _find_by_guard(latest, operands, given, workspace)
            if found is not None:
                return *found, None
        key, pointers = _signature(options, operands, given, workspace)
        checked = _KNOWN.get(key)
    except Exception:  # sparse, fake, of no library, no key: the long way says what is wrong, if anything is
        return None, (), None
    if checked is None:
        return None, pointers, key
    if checked.guard is not None:
        _put_first(options, checked)
    if (given is None and workspace is None) or _apart(checked, pointers, given, workspace):
        return checked, pointers, key
    return None, pointers, key


def _find_by_guard(
    latest: tuple[Checked, ...], operands: tuple, given: tuple | None, workspace: Any
) -> tuple[Checked, list[int]] | None:
    arrays = [obj for obj in operands if obj is not None]
    own = given is not None or workspace is not None
    if own:
        arrays += [obj for obj in (*(given or ()), workspace) if obj is not None]
    for checked in latest:
        if checked.guard(*arrays):  # pyright: ignore[reportOptionalCall]
            break
    else:
        return None
    # What a guard does not see: the addresses. They decide the width of accesses, and what lies on what.
    pointer_of = checked.library.pointer
    pointers = [0 if obj is None else pointer_of(obj) for obj in operands]
    bits = 0
    for pointer in map(pointer_of, arrays) if own else pointers:
        bits |= pointer
    if bits & 15 or (own and not _apart(checked, pointers, given, workspace)):
        return None
    return checked, pointers


def _signature(options: tuple, operands: tuple, given: tuple | None, workspace: Any) -> tuple[tuple, tuple]:
    key: list[Any] = [options]
    pointers = []
    for obj in operands:
        traits, pointer = (_SIGNATURES.get(type(obj)) or _reader_of(obj))(obj)
        key.append(traits)
        pointers.append(pointer)
    if given is not None or workspace is not None:
        for obj in (*(given or ()), workspace):
            key.append(None if obj is None else known_library_of(obj).signature_of_output(obj))
    return tuple(key), tuple(pointers)


def remember(
    key: tuple, checked: Checked, operands: tuple, pointers: tuple, given: tuple | None, workspace: Any
) -> None:
    """Keeps a checked call for all others of its signature."""
    arrays = [obj for obj in (*operands, *(given or ()), workspace) if obj is not None]
    if not any(known_library_of(obj).pointer(obj) & 15 for obj in arrays):
        checked.guard = checked.library.guard(arrays)
    checked.spans = _spans(operands, pointers)
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    _KNOWN[key] = checked
    if checked.guard is not None:
        _put_first(key[0], checked)


def _put_first(options: tuple, checked: Checked) -> None:
    _KNOWN[options] = (checked, *[other for other in _KNOWN.get(options, ()) if other is not checked][: _LATEST - 1])


def same_layout(given: Any, operand: Any) -> bool:
    """Whether two arrays have their elements at the same places from their pointers on."""
    if given is None or operand is None:
        return False
    (a, _), (b, _) = (known_library_of(obj).signature(obj) for obj in (given, operand))
    return a[1:4] == b[1:4]  # shape, strides, dtype


def _spans(operands: tuple, pointers: tuple) -> tuple[tuple[int, int] | None, ...]:
    """The bytes of each operand relative to its pointer."""
    extents = (None if obj is None else known_library_of(obj).extent(obj) for obj in operands)
    return tuple(
        None if extent is None else (extent[0] - pointer, extent[1] - pointer)
        for extent, pointer in zip(extents, pointers, strict=True)
    )


def _apart(checked: Checked, pointers: Any, given: tuple | None, workspace: Any) -> bool:
    """Whether every given result is disjoint from all else, or exactly in place where that is allowed."""
    written = [(index, known_library_of(obj).extent(obj)) for index, obj in enumerate(given or ()) if obj is not None]
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
