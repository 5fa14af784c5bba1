"""Recorded calls: what is left of a call once door and plan are done, and how the next one like it goes straight there.

Knows: which properties of its arguments decide that a call is valid and what it launches, and how little has to be done
for the next call that has them. At decode sizes every line of Python counts, so that little is written out as a
function of its own for each call that has passed the door, with the parameters of the public function.
Must not: decide what is valid. A call that nobody recalls takes the long way, which also gives the messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import numpy as np

from .devices import Launch
from .libraries import Device, Library, known_library_of

# One argument of a launch: a number, the name of a pointer (p_x…: of the operands, by parameter; q0…: of the results;
# start: of the scratch), or an offset into the scratch.
Argument = int | float | str | tuple[str, int]
Step = tuple[Launch, Sequence[Argument]]


@dataclass(slots=True)
class Call:
    """A call that has passed the door, compiled: to allocate, fill in pointers and launch is all that is left."""

    library: Library
    device: Device
    place: tuple[Callable[[], int], Callable[[int], Any]] | None  # tells and switches the current device, if several
    makers: Sequence[partial[Any] | None]  # of each result, None where it is not wanted
    make_scratch: partial[Any] | None
    steps: Sequence[Step]
    operands: dict[str, Any]  # by parameter, None where absent
    given: dict[str, Any]  # for each result a variable, and the caller's array for it or None
    workspace: Any = None
    share: bool = False  # the first result is also the second
    in_place: Sequence[tuple[str, str]] = ()  # (given, operand) that may lie on one another exactly

    def run(self, pointers: dict[str, int]) -> tuple[Any, ...]:
        """The results in order, None where not wanted. The same lines as for the next call, without its guards."""
        arrays, space = self.arrays(), {}
        parameters = ", ".join([*(f"p_{name}" for name in self._operands()), *self._given()])
        run = _function([f"def run({parameters}):", *self._body(space, f"run({parameters})")], space, "run")
        return run(*(pointers[name] for name in self._operands()), *(arrays[name] for name in self._given()))

    def recall(self, written: Written) -> Callable[..., Any]:
        """A function with the parameters of `written`: its results, or None for a call unlike this one."""
        space = dict(written.space)
        parameters = ", ".join(written.parameters)
        lines = [
            f"def recall({parameters}):", *written.opening, *self._conditions(space, written), *written.seen,
            *self._body(space, f"recall({parameters})", written),
        ]  # fmt: skip
        return _function(lines, space, "recall")

    def _operands(self) -> list[str]:
        return [name for name, obj in self.operands.items() if obj is not None]

    def _given(self) -> list[str]:
        names = [name for name, obj in self.given.items() if obj is not None]
        return names if self.workspace is None else [*names, "workspace"]

    def arrays(self) -> dict[str, Any]:
        """The arrays that are there, by variable; operands first."""
        named = {**self.operands, **self.given, "workspace": self.workspace}
        return {name: obj for name, obj in named.items() if obj is not None}

    def _body(self, space: dict[str, Any], again: str, recalled: Written | None = None) -> list[str]:
        """Allocate, launch, return, for a recall as `recalled` says. `again`: the call of the function itself. Pointers
        of the operands are in variables, for a recall those of the given arrays too. Numbers go to `space`, so that
        calls of one kind share one text."""
        lines, texts = [], []
        values: dict[str, Any] = {f"p_{name}": 0 for name, obj in self.operands.items() if obj is None}
        if self.place is not None:
            space["current"], space["switch"], space["index"] = *self.place, self.device.index
            lines += ["    if current() != index:", f"        with switch(index): return {again}"]
        if self.steps:
            lines += [f"    here = {self.library.stream_text(self.device, space)}"]
        for i, (make, (name, obj)) in enumerate(zip(self.makers, self.given.items(), strict=True)):
            texts.append("None" if make is None else f"r{i}" if obj is None else name)
            if make is None:
                values[f"q{i}"] = 0
            elif recalled is not None and i in recalled.made:
                lines += recalled.made[i]
            elif obj is None:
                lines += [f"    r{i} = {_called(make, f'make{i}', space)}"]
                lines += [f"    q{i} = {self.library.pointer_text(f'r{i}')}"]
            elif recalled:
                values[f"q{i}"] = f"p_{name}"
            else:
                lines += [f"    q{i} = {self.library.pointer_text(name)}"]
        if self.make_scratch is None:
            values["start"] = 0
        elif self.workspace is None:
            # A name of its own keeps fresh scratch alive until the launches that use it are in its stream.
            lines += [f"    scratch = {_called(self.make_scratch, 'make_scratch', space)}"]
            lines += [f"    start = {self.library.pointer_text('scratch')}"]
        elif recalled:
            values["start"] = "p_workspace"
        else:
            lines += [f"    start = {known_library_of(self.workspace).pointer_text('workspace')}"]
        for number, (launch, arguments) in enumerate(self.steps):
            lines += launch.lines([_argument(argument, values, space) for argument in arguments], space, number)
        for name in self._given():
            library = known_library_of(self.arrays()[name])
            if type(library).written is not Library.written:
                space[f"written_{name}"] = library.written
                lines += [f"    written_{name}({name})"]
        if self.share:
            texts[1] = texts[0]
        return [*lines, f"    return {', '.join(texts) if recalled is None else recalled.results.format(*texts)}"]

    def _conditions(self, space: dict[str, Any], recalled: Written) -> list[str]:
        """What makes another call one like this: its arrays' properties, their alignment, and what lies on what."""
        arrays = {name: obj for name, obj in self.arrays().items() if f"p_{name}" not in recalled.parameters}
        written, lines = self._given(), []
        pointers = {name: known_library_of(obj).pointer(obj) for name, obj in arrays.items()}
        for library in dict.fromkeys(known_library_of(obj) for obj in arrays.values()):
            own = {name: obj for name, obj in arrays.items() if known_library_of(obj) is library}
            lines += [f"    if not ({library.guard_text(own, written, space)}): return"]
            lines += [f"    p_{name} = {library.guarded_pointer_text(name)}" for name in own]
        # Alignment decides how wide the kernels' accesses are.
        if any(pointer & 15 for pointer in pointers.values()):
            terms = [f"p_{name} & 15 != {pointer & 15}" for name, pointer in pointers.items()]
            lines += [f"    if {' or '.join(terms)}: return"]
        else:
            lines += [f"    if ({' | '.join(f'p_{name}' for name in pointers)}) & 15: return"]
        extents = {
            name: tuple(edge - pointers[name] for edge in known_library_of(obj).extent(obj))
            for name, obj in arrays.items()
        }
        seen: list[str] = []
        for name in arrays:
            for other in seen if name in written else ():
                low = _constant(extents[other][0] - extents[name][1], space)
                high = _constant(extents[other][1] - extents[name][0], space)
                apart = f"{low} < p_{name} - p_{other} < {high}"
                same = f" and p_{name} != p_{other}" if (name, other) in self.in_place else ""
                lines += [f"    if {apart}{same}: return"]
            seen.append(name)
        return lines


@dataclass(slots=True)
class Written:
    """How a recalled call is asked for and what it gives back."""

    parameters: Sequence[str]  # p_x for an operand x of which only the pointer comes, known to be right
    opening: Sequence[str]  # lines that look at what is no array, and take tuples of arrays apart
    results: str  # what is returned, {0} the first result
    seen: Sequence[str] = ()  # lines that look further at arrays, once their properties are known to be the same
    made: dict[int, Sequence[str]] = field(default_factory=dict)  # lines that make a result r… and its pointer q…
    space: dict[str, Any] = field(default_factory=dict)


def _argument(argument: Argument, values: dict[str, Any], space: dict[str, Any]) -> str | int | float:
    if isinstance(argument, str):
        return values.get(argument, argument)
    if isinstance(argument, tuple):
        return f"{values.get(argument[0], argument[0])} + {_constant(argument[1], space)}"
    return argument


def _called(function: partial[Any], name: str, space: dict[str, Any]) -> str:
    """The call of `function` without the partial's own."""
    space[name] = partial(function.func, **function.keywords) if function.keywords else function.func
    return f"{name}({', '.join(_constant(argument, space) for argument in function.args)})"


def _constant(value: Any, space: dict[str, Any]) -> str:
    name = f"k{len(space)}"
    space[name] = value
    return name


def _function(lines: Sequence[str], space: dict[str, Any], name: str) -> Callable[..., Any]:
    exec(_compiled("\n".join(lines)), space)
    return space[name]


@lru_cache(maxsize=512)
def _compiled(text: str) -> CodeType:
    return compile(text, "<rmsnorm_raw call>", "exec")


# ------------------------------------------------------------------------------------------------ memory


# Whether torch.compile reads what calls this: it would guard on what is recorded here, and compile again with each new
# call. torch's own function, once torch is there: asking whether it is takes longer than the answer.
is_traced: Callable[[], bool] = bool


def _look_for_torch() -> bool:
    """As `is_traced`, which it sets."""
    global is_traced
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    is_traced = torch.compiler.is_dynamo_compiling
    return False


_MOST = 4096
_LATEST = 4
_ENTRIES: list[Entry] = []

_VALUES = {type(None), bool, int, float, str}

# How the properties of an argument are read, by its exact type.
_SIGNATURES: dict[type, Callable[[Any], tuple]] = {}


class Entry:
    """A public function, and its calls that are known. It tries `latest` in order before it takes the long way."""

    def __init__(self, *parameters: str):
        self.parameters = parameters
        self.latest: tuple[Callable[..., Any], ...] = ()
        self.known: dict[tuple, Callable[..., Any] | None] = {}  # by signature; None after its first time
        _ENTRIES.append(self)

    def find(self, *arguments: Any) -> tuple[Any, Ticket | None]:
        """(the results of a call like a recorded one, None), or (None, what the call that follows is recorded with).
        Without the latter only the long way is left."""
        for recall in () if is_traced() else self.latest:
            results = recall(*arguments)
            if results is not None:
                return results, None
        return self.look_up(*arguments)

    def look_up(self, *arguments: Any) -> tuple[Any, Ticket | None]:
        """The same for calls that are none of the latest."""
        if _look_for_torch():
            return None, None
        try:
            signature = _signature_of_several(arguments)
            known = self.known.get(signature)
        except Exception:  # sparse, fake, of no library, no key: the long way says what is wrong, if anything is
            return None, None
        if known is not None:
            results = known(*arguments)
            if results is not None:
                self._put_first(known)
                return results, None
        return None, Ticket(self, signature, arguments)

    def meets_again(self, signature: tuple) -> bool:
        """Whether a call of this signature was here before. Only then it is kept: to write it out takes 80 µs, too much
        where every batch has other rows."""
        if signature in self.known:
            return True
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[signature] = None
        return False

    def keep(self, signature: tuple, recall: Callable[..., Any]) -> None:
        self.known[signature] = recall
        self._put_first(recall)

    def _put_first(self, recall: Callable[..., Any]) -> None:
        self.latest = with_first(recall, self.latest)


@dataclass(slots=True)
class Ticket:
    """What a call on the long way is recorded with."""

    entry: Entry
    signature: tuple
    arguments: tuple[Any, ...]

    def remember(self, call: Call, results: str, opening: Sequence[str] = (), **how: Any) -> bool:
        """Whether the call is kept. `opening`: only what the plain arguments do not say; the others are `Written`'s."""
        if not self.entry.meets_again(self.signature):
            return False
        arrays = call.arrays()
        named = zip(self.entry.parameters, self.arguments, strict=True)
        plain = {name: value for name, value in named if name not in arrays and not isinstance(value, (tuple, list))}
        if any(_SIGNATURES[type(value)] is not _signature_of_value for value in plain.values()):
            return False  # such as an eps in an array, which may change
        space = how.pop("space", {})
        terms = [_same_value(name, value, space) for name, value in plain.items()]
        lines = [f"    if not ({' and '.join(terms)}): return", *opening]
        recalled = Written(self.entry.parameters, lines, results, space=space, **how)
        self.entry.keep(self.signature, call.recall(recalled))
        return True


def with_first(recall: Callable[..., Any], latest: tuple[Callable[..., Any], ...]) -> tuple[Callable[..., Any], ...]:
    return (recall, *[other for other in latest if other is not recall][: _LATEST - 1])


def forget() -> None:
    """All recorded calls."""
    for entry in _ENTRIES:
        entry.latest = ()
        entry.known = {}


def _same_value(name: str, value: Any, space: dict[str, Any]) -> str:
    """An expression that is true where the variable `name` holds the same."""
    if value is None or isinstance(value, bool):
        return f"{name} is {value}"
    constant = _constant(value, space)
    if isinstance(value, (int, float)):
        kind = _constant(type(value), space)
        return f"({name} is {constant} or (type({name}) is {kind} and {name} == {constant}))"
    return f"{name} is {constant}"


def _reader(obj: Any) -> Callable[[Any], tuple]:
    kind = type(obj)
    if kind in (tuple, list):
        reader = _signature_of_several
    elif hasattr(kind, "__dlpack__"):
        reader = known_library_of(obj).signature
    else:
        reader = _signature_of_value
    _SIGNATURES[kind] = reader
    return reader


def _signature_of_value(obj: Any) -> tuple:
    if type(obj) not in _VALUES and not isinstance(obj, (type, np.dtype)) and str(type(obj)) != "<class 'torch.dtype'>":
        raise TypeError  # nobody knows what it becomes
    return type(obj), obj


def _signature_of_several(objects: Any) -> tuple:
    return type(objects), *((_SIGNATURES.get(type(obj)) or _reader(obj))(obj) for obj in objects)


def same_layout(given: Any, operand: Any) -> bool:
    """Whether two arrays have their elements at the same places from their pointers on."""
    if given is None or operand is None:
        return False
    a, b = (known_library_of(obj).signature(obj) for obj in (given, operand))
    return a[1:4] == b[1:4]  # shape, strides, dtype
