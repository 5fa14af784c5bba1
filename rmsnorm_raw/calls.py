"""Recorded calls: what is left of a call once door and plan are done, and how the next one like it goes straight there.

Knows: which properties of its arrays decide that a call is valid and what it launches, and how little has to be done
for the next call that has them. At decode sizes every line of Python counts, so that little is written out as a
function of its own for each call that has passed the door: `run` does the work, `recall` looks whether it may.
Must not: decide what is valid. A call that nobody recalls takes the long way, which also gives the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from .libraries import Device, Library, known_library_of

# One argument of a launch: an integer, the name of a value (p0…: pointers of the operands; q0…: of the results; eps;
# offset), or an offset into the scratch.
Argument = int | str | tuple[str, int]
Step = tuple[Callable[[tuple, int], None], Sequence[Argument]]


@dataclass(slots=True)
class Call:
    """A call that has passed the door, compiled: to allocate, fill in pointers and launch is all that is left."""

    library: Library
    device: Device
    place: tuple[Callable[[], int], Callable[[int], Any]] | None  # tells and switches the current device, if several
    makers: Sequence[Callable[[], Any] | None]  # of each result, None where it is not wanted
    make_scratch: Callable[[], Any] | None
    steps: Sequence[Step]
    operands: tuple[Any, ...]
    given: tuple[Any, ...]  # the caller's arrays for the results, then the scratch; None where there is none
    share: bool = False  # the first result is also the second
    in_place: Sequence[tuple[int, int]] = ()  # (result, operand) that may lie on one another exactly
    eps: float = 0.0  # what None means
    written_out: Callable[..., tuple[Any, ...]] | None = None  # `run` as a function of its own

    def run(self, pointers: Sequence[int], given: Sequence[Any], eps: float, weight_offset: float) -> tuple[Any, ...]:
        """The results in order, None where not wanted."""
        run = self.written_out
        if run is None:
            space: dict[str, Any] = {}
            exec(_compiled("\n".join([f"def run({self._parameters('p')}):", *self._body(space)])), space)
            run = space["run"]
        return run(*pointers, *given, eps, weight_offset)

    def recall(self) -> Callable[..., tuple[Any, ...] | None]:
        """A function of operands, given arrays, eps and weight_offset: the results, or None for a call unlike this."""
        space: dict[str, Any] = {"EPS": self.eps}
        lines = [
            f"def run({self._parameters('p')}):", *self._body(space),
            f"def recall({self._parameters('o')}):", *self._conditions(space),
            "    if eps is None: eps = EPS", *self._body(space, addressed=True),
        ]  # fmt: skip
        exec(_compiled("\n".join(lines)), space)
        self.written_out = space["run"]
        return space["recall"]

    def _parameters(self, first: str) -> str:
        names = [f"{first}{i}" for i in range(len(self.operands))]
        return ", ".join([*names, *self._given_names(), "eps", "offset"])

    def _given_names(self) -> list[str]:
        return [f"g{i}" for i in range(len(self.makers))] + ["workspace"]

    def _body(self, space: dict[str, Any], addressed: bool = False) -> list[str]:
        """Allocate, launch, return. Numbers go to `space`, so that calls of one kind share one text. `addressed`: the
        variables of the given arrays' addresses are there already."""
        lines = []
        results, values = [], {f"p{i}": "0" for i, obj in enumerate(self.operands) if obj is None}
        if self.place is not None:
            space["current"], space["switch"], space["index"] = *self.place, self.device.index
            pointers = [values.get(f"p{i}", f"p{i}") for i in range(len(self.operands))]
            lines += [
                "    if current() != index:",
                f"        with switch(index): return run({', '.join([*pointers, *self._given_names()])}, eps, offset)",
            ]
        for i, make in enumerate(self.makers):
            results.append("None" if make is None else f"r{i}")
            values[f"q{i}"] = "0" if make is None else f"q{i}"
            if make is not None:
                space[f"make{i}"] = make
                given = self.given[i] is not None
                lines += [f"    r{i} = {f'g{i}' if given else f'make{i}()'}"]
                lines += [] if given and addressed else [f"    q{i} = {self.library.pointer_text(f'r{i}')}"]
        if self.make_scratch is None:
            values["start"] = "0"
        else:
            space["make_scratch"] = self.make_scratch
            workspace = self.given[-1]
            library = self.library if workspace is None else known_library_of(workspace)
            # A name of its own keeps fresh scratch alive until the launches that use it are in its stream.
            lines += [f"    scratch = {'make_scratch()' if workspace is None else 'workspace'}"]
            if workspace is None or not addressed:
                lines += [f"    start = {library.pointer_text('scratch')}"]
        lines += [f"    here = {self.library.stream_text(self.device, space)}"]
        for number, (launch, arguments) in enumerate(self.steps):
            texts = ", ".join(_argument(argument, values, space) for argument in arguments)
            text, own = getattr(launch, "inline", ("    {launch}(({arguments}), here)", {"launch": launch}))
            space |= {f"{name}{number}": value for name, value in own.items()}
            lines += [text.format(arguments=texts, **{name: f"{name}{number}" for name in own})]
        for name, obj in zip(self._given_names(), self.given, strict=True):
            if obj is not None and type(known_library_of(obj)).written is not Library.written:
                space[f"written_{name}"] = known_library_of(obj).written
                lines += [f"    written_{name}({name})"]
        if self.share:
            results[1] = results[0]
        return [*lines, f"    return {', '.join(results)}"]

    def _conditions(self, space: dict[str, Any]) -> list[str]:
        """What makes another call one like this: its arrays' properties, their alignment, and what lies on what."""
        names = [f"o{i}" for i in range(len(self.operands))] + self._given_names()
        arrays = [*self.operands, *self.given]
        there = [(name, obj) for name, obj in zip(names, arrays, strict=True) if obj is not None]
        conditions = [
            library.guard_text([(n, obj, n[0] != "o") for n, obj in there if known_library_of(obj) is library], space)
            for library in dict.fromkeys(known_library_of(obj) for _, obj in there)
        ]
        lines = [f"    if not ({' and '.join(conditions)}): return"]
        address: dict[str, str] = {}  # the variable with an array's pointer
        pointers: list[int] = []
        for name, obj in there:
            library = known_library_of(obj)
            address[name] = "start" if name == "workspace" else {"o": "p", "g": "q"}[name[0]] + name[1:]
            pointers.append(library.pointer(obj))
            lines += [f"    {address[name]} = {library.pointer_text(name)}"]
        # Alignment decides how wide the kernels' accesses are.
        if any(pointer & 15 for pointer in pointers):
            pairs = zip(address.values(), pointers, strict=True)
            lines += [f"    if {' or '.join(f'{a} & 15 != {p & 15}' for a, p in pairs)}: return"]
        else:
            lines += [f"    if ({' | '.join(address.values())}) & 15: return"]
        extents = {
            name: tuple(edge - pointer for edge in known_library_of(obj).extent(obj))
            for (name, obj), pointer in zip(there, pointers, strict=True)
        }
        allowed = {(f"g{result}", f"o{operand}") for result, operand in self.in_place}
        for position, (name, _) in enumerate(there):
            if name[0] == "o":
                continue
            for other, _ in there[:position]:
                low = _constant(extents[other][0] - extents[name][1], space)
                high = _constant(extents[other][1] - extents[name][0], space)
                apart = f"{low} < {address[name]} - {address[other]} < {high}"
                same = f" and {address[name]} != {address[other]}" if (name, other) in allowed else ""
                lines += [f"    if {apart}{same}: return"]
        return lines


def _argument(argument: Argument, values: dict[str, str], space: dict[str, Any]) -> str:
    if isinstance(argument, str):
        return values.get(argument, argument)
    if isinstance(argument, tuple):
        return f"{values.get(argument[0], argument[0])} + {_constant(argument[1], space)}"
    return _constant(argument, space)


def _constant(value: int, space: dict[str, Any]) -> str:
    name = f"k{len(space)}"
    space[name] = value
    return name


@lru_cache(maxsize=512)
def _compiled(text: str) -> CodeType:
    return compile(text, "<rmsnorm_raw call>", "exec")


# ------------------------------------------------------------------------------------------------ memory

# By signature, a call's `recall`, None after its first time; by options alone, the latest of these.
_KNOWN: dict[tuple, Any] = {}
_MOST = 4096
_LATEST = 4

# How an operand's properties are read, by its exact type.
_SIGNATURES: dict[type, Callable[[Any], tuple]] = {type(None): lambda obj: ()}


def recall(options: tuple, arguments: tuple, operands: int) -> tuple[tuple[Any, ...] | None, tuple | None]:
    """(the results of a call like a recorded one, None), or (None, the signature to record it by).

    `options` are what decides beside arrays, and which arrays are there; `arguments` those of a `Call.recall`, of which
    the first are the operands. Without a signature only the long way is left.
    """
    try:
        latest = _KNOWN.get(options)
    except TypeError:  # an option that cannot be a key
        return None, None
    if latest is not None:
        for call in latest:
            results = call(*arguments)
            if results is not None:
                return results, None
    try:
        signature = _signature(options, arguments, operands)
    except Exception:  # sparse, fake, of no library: the long way says what is wrong, if anything is
        return None, None
    call = _KNOWN.get(signature)
    if call is None:
        return None, signature
    _put_first(options, call)
    return call(*arguments), signature


def remember(signature: tuple, call: Call) -> None:
    """Keeps a call for all others of its signature, from its second time on: writing it out takes 80 µs, too much where
    every batch has other rows."""
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    if signature not in _KNOWN:
        _KNOWN[signature] = None
        return
    _KNOWN[signature] = recall = call.recall()
    _put_first(signature[0], recall)


def _signature(options: tuple, arguments: tuple, operands: int) -> tuple:
    key: list[Any] = [options]
    for obj in arguments[:operands]:
        key.append((_SIGNATURES.get(type(obj)) or _reader_of(obj))(obj))
    for obj in arguments[operands:-2]:
        key.append(None if obj is None else known_library_of(obj).signature_of_output(obj))
    return tuple(key)


def _reader_of(obj: Any) -> Callable[[Any], tuple]:
    reader = _SIGNATURES[type(obj)] = known_library_of(obj).signature
    return reader


def _put_first(options: tuple, call: Callable) -> None:
    _KNOWN[options] = (call, *[other for other in _KNOWN.get(options, ()) if other is not call][: _LATEST - 1])


def same_layout(given: Any, operand: Any) -> bool:
    """Whether two arrays have their elements at the same places from their pointers on."""
    if given is None or operand is None:
        return False
    a, b = (known_library_of(obj).signature(obj) for obj in (given, operand))
    return a[1:4] == b[1:4]  # shape, strides, dtype
