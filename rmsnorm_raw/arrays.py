"""The door: everything that a call can get wrong is refused here, and arrays become rows with a pitch.

Knows: what operands must be to each other. How a library's arrays are looked at is in libraries.py.
Must not: know kernels or plans. What has passed this door is not checked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .libraries import DTYPES, HOST, Array, dtype_name, library_of

__all__ = ["ABSENT", "SIZE", "Door", "Rows", "dtype_name"]

SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(slots=True)
class Rows:
    """An array seen as rows of contiguous columns, `pitch` elements apart (any sign, 0 included)."""

    pointer: int
    pitch: int
    dtype: str
    array: Array


ABSENT = Rows(0, 0, "", Array(0, (), (), "", HOST, None, None))


class Door:
    """What one call has passed in: views by name, all on x's device and in dtypes that go together."""

    def __init__(self, x: Any, name: str = "x"):
        self.library = library_of(x, name)
        self.copied = False  # whether an operand had to be
        self.x = self._view(x, name, self.library)
        if not self.x.shape:
            raise ValueError(f"{name} is 0-d; it needs at least one dimension, the columns")
        self.shape = self.x.shape
        self.cols = self.x.shape[-1]
        if self.cols == 0:
            raise ValueError(f"{name} has shape {self.shape}: rows of 0 columns have no mean")
        self.rows = self.x.size // self.cols
        self.device = self.x.device
        self.heads = 1
        self.other_streams: set[int] = set()
        self._named: list[tuple[str, Rows]] = []
        self._memory: list[tuple[str, Rows | tuple[int, int]]] = []  # of the callers' own arrays, copied or not
        self.x_rows = self._as_rows(self.x, name)

    def rows_of(self, obj: Any, name: str) -> Rows:
        """An operand of x's shape."""
        view = self._view(obj, name)
        if view.shape != self.shape:
            raise ValueError(f"{name} has shape {view.shape}, x has {self.shape}; they must be equal")
        return self._as_rows(view, name)

    def weight(self, obj: Any, name: str) -> Rows:
        """A weight or bias: (columns,), or (heads, columns) for x (…, heads, columns)."""
        view = self._view(obj, name)
        if view.shape == (self.cols,):
            heads = 1
        elif len(view.shape) == 2 and view.shape == self.shape[-2:]:
            heads = view.shape[0]
        elif len(view.shape) == 1:
            raise ValueError(
                f"{name} has {view.shape[0]} values, x has {self.cols} columns (shapes {view.shape} and {self.shape})"
            )
        else:
            raise ValueError(
                f"{name} has shape {view.shape}, x has {self.shape}; {name} must be ({self.cols},), "
                "or (heads, columns) for x of shape (…, heads, columns)"
            )
        if heads != self.heads and any(seen in ("weight", "bias") for seen, _ in self._named):
            raise ValueError(f"weight and bias must have one shape; {name} has {view.shape}, the other has not")
        self.heads = heads
        rows = self._as_rows(view, name)
        if heads > 1 and rows.pitch != self.cols:  # the kernels step from head to head by the columns
            rows = self._as_rows(self._copy(view), name, replace=True)
        return rows

    def rstd(self, obj: Any) -> Rows:
        """The forward's rstd: one value for each row, contiguous."""
        view = self._view(obj, "rstd", check_dtype=False)
        expected = "float64" if self.x.dtype == "float64" else "float32"
        if view.dtype != expected:
            raise TypeError(f"rstd is {view.dtype}; for x of {self.x.dtype} it must be {expected}, as from the forward")
        if view.shape not in (self.shape[:-1], (self.rows,)):
            raise ValueError(
                f"rstd has shape {view.shape}, x has {self.shape}; it must be {self.shape[:-1]} or ({self.rows},)"
            )
        if not _is_contiguous(view):
            view = self._copy(view)
        rows = Rows(view.pointer, 1, view.dtype, view)
        self._memory.append(("rstd", view.copied_from or rows))
        return rows

    def output(
        self,
        obj: Any,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        in_place_of: tuple[str, ...] = (),
        contiguous: bool = False,
    ) -> Rows | None:
        """Checks a caller's own output array; None stays None, to be allocated once all checks have passed.

        It may be exactly one of the operands `in_place_of`; any other overlap with an operand is refused.
        """
        if obj is None:
            return None
        library = library_of(obj, name)
        library.refuse_to_write(obj, name)
        if library is not self.library:
            raise TypeError(f"{name} is a {library.name} array, x is {self.library.name}; they must be of one library")
        view = library.view(obj, name)
        if view.owner is not obj:
            raise ValueError(f"{name} cannot be written in place (misaligned, or a lazily negated tensor)")
        if view.device != self.device:
            raise ValueError(f"{name} is on {view.device}, x is on {self.device}")
        if view.dtype != dtype:
            raise TypeError(f"{name} is {view.dtype}; the result is {dtype}")
        if view.shape != shape:
            raise ValueError(f"{name} has shape {view.shape}; the result has {shape}")
        pitch = _row_pitch(view)
        apart = pitch is not None and (abs(pitch) >= shape[-1] or view.size == shape[-1])
        if pitch is None or not apart or (contiguous and not _is_contiguous(view)):
            wanted = "it must be contiguous" if contiguous else "its rows must be contiguous and apart"
            raise ValueError(f"{name} has strides {view.strides} (in elements); {wanted}")
        rows = Rows(view.pointer, pitch, view.dtype, view)
        self._refuse_overlap(rows, name, in_place_of)
        self._memory.append((name, rows))
        return rows

    def _refuse_overlap(self, rows: Rows, name: str, in_place_of: tuple[str, ...] = ()) -> None:
        for other_name, other in self._memory:
            if isinstance(other, tuple):
                low, high = _extent(rows)
                clash = low < other[1] and other[0] < high
            else:
                clash = _overlap(rows, other) and not (other_name in in_place_of and _same_memory(rows, other))
            if clash:
                allowed = f"; only exactly {' or '.join(in_place_of)} may be written in place" if in_place_of else ""
                raise ValueError(f"{name} overlaps {other_name} in memory{allowed}")

    def result(self, given: Rows | None, shape: tuple[int, ...], dtype: str) -> Rows:
        """The caller's output, or where a fresh one will lie: aligned, its rows one after the other."""
        return given or Rows(0, shape[-1] if shape else 1, dtype, Array(0, shape, (), dtype, self.device, None, None))

    def zeros(self, given: Any, shape: tuple[int, ...], dtype: str) -> Any:
        if given is None:
            return self.library.zeros(shape, dtype, self.x)
        given[...] = 0
        self.library.written(given)
        return given

    def can_be_remembered(self) -> bool:
        """Whether a call with operands of the same properties needs nothing that this one's signature does not hold."""
        return self.rows > 0 and not self.copied and not self.other_streams and self.library.name != "DLPack"

    def workspace(self, obj: Any, needed: int) -> None:
        """Checks the caller's scratch memory: at least `needed` bytes of its own."""
        if obj is None:
            return
        library = library_of(obj, "workspace")
        library.refuse_to_write(obj, "workspace")
        view = library.view(obj, "workspace")
        if view.device != self.device:
            raise ValueError(f"workspace is on {view.device}, x is on {self.device}")
        if view.owner is not obj or not _is_contiguous(view):
            raise ValueError("workspace must be contiguous and aligned to its elements")
        have = view.size * _item_size(obj)
        if have < needed or view.pointer % 16:
            raise ValueError(
                f"workspace has {have} bytes at an address that is {view.pointer % 16} beyond a multiple of 16; "
                f"this call needs {needed} bytes, 16-byte aligned"
            )
        span = Array(view.pointer, (have,), (1,), "bytes", view.device, library, obj)
        self._refuse_overlap(Rows(view.pointer, 0, "bytes", span), "workspace")
        if library is not self.library and self.device.kind == "gpu":
            self.other_streams.add(library.stream(self.device))

    def stream(self) -> int:
        return self.library.stream(self.device)

    def finish(self, result: Any) -> Any:
        """What the caller gets back."""
        return None if result is None else self.library.finish(result)

    def alignment(self, extra: tuple[Rows, ...], pack: int) -> int:
        """Elements that every operand allows in one memory access, at most a pack."""
        vector = pack
        for rows in (*(rows for _, rows in self._named), *extra):
            size = SIZE[rows.dtype]
            bits = rows.pointer | abs(rows.pitch) * size | 16
            aligned = bits & -bits
            if aligned < min(16, pack * size):
                vector = min(vector, max(1, aligned // size))
        return vector

    def _view(self, obj: Any, name: str, library: Any = None, check_dtype: bool = True) -> Array:
        library = library or library_of(obj, name)
        view = library.view(obj, name)
        self.copied |= view.owner is not obj  # misaligned, or a lazily negated tensor
        if check_dtype and view.dtype not in DTYPES:
            raise TypeError(f"{name} is {view.dtype}; it must be one of {', '.join(DTYPES)}")
        if name == "x" or not hasattr(self, "device"):
            return view
        if view.device != self.device:
            raise ValueError(f"{name} is on {view.device}, x is on {self.device}; all operands must be on one device")
        if check_dtype and (view.dtype == "float64") != (self.x.dtype == "float64"):
            raise TypeError(f"{name} is {view.dtype}, x is {self.x.dtype}; float64 goes only with float64")
        if library is not self.library and self.device.kind == "gpu":
            self.other_streams.add(library.stream(self.device))
        return view

    def _as_rows(self, view: Array, name: str, replace: bool = False) -> Rows:
        pitch = _row_pitch(view)
        if pitch is None:
            view = self._copy(view)
            pitch = view.shape[-1]
        rows = Rows(view.pointer, pitch, view.dtype, view)
        if replace:
            self._named.pop()
        else:
            self._memory.append((name, view.copied_from or rows))
        self._named.append((name, rows))
        return rows

    def _copy(self, view: Array) -> Array:
        self.copied = True
        library = view.library
        copied = library.contiguous(view.owner)
        inner = library_of(copied, "copy").view(copied, "copy")
        inner.library = library
        inner.copied_from = view.copied_from or _extent(Rows(view.pointer, 0, view.dtype, view))
        return inner


def _item_size(obj: Any) -> int:
    size = getattr(obj, "itemsize", None)  # NumPy, CuPy, torch ≥ 2.1
    return int(size) if size is not None else int(obj.dtype.itemsize)


def _is_contiguous(view: Array) -> bool:
    expected = 1
    for length, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if length != 1 and stride != expected:
            return view.size == 0
        expected *= length
    return True


def _row_pitch(view: Array) -> int | None:
    """Elements from row to row, if the last dimension is contiguous and all others step evenly; else None."""
    shape, strides = view.shape, view.strides
    if view.size == 0:
        return shape[-1]
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    pitch = rows = None
    for length, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if length == 1:
            continue
        if pitch is None or rows is None:
            pitch, rows = stride, length
        elif stride != pitch * rows:
            return None
        else:
            rows *= length
    return pitch or 0  # a single row has none


def _extent(rows: Rows) -> tuple[int, int]:
    view = rows.array
    size = SIZE.get(rows.dtype, 1)
    steps = [(n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)]
    low = rows.pointer + size * sum(min(0, s) for s in steps)
    high = rows.pointer + size * (sum(max(0, s) for s in steps) + 1)
    return low, high


def _same_memory(a: Rows, b: Rows) -> bool:
    return a.pointer == b.pointer and a.dtype == b.dtype and (a.pitch == b.pitch or a.array.size == a.array.shape[-1])


def _overlap(a: Rows, b: Rows) -> bool:
    """Whether two views share a byte. Views of equal pitch may interleave (columns of one base) without sharing any."""
    if a.array.size == 0 or b.array.size == 0:
        return False
    (a_low, a_high), (b_low, b_high) = _extent(a), _extent(b)
    if a_high <= b_low or b_high <= a_low:
        return False
    pitch = abs(a.pitch) * SIZE.get(a.dtype, 1)
    if pitch and pitch == abs(b.pitch) * SIZE.get(b.dtype, 1):
        offset = (b_low - a_low) % pitch
        a_width = a.array.shape[-1] * SIZE[a.dtype]
        b_width = b.array.shape[-1] * SIZE[b.dtype]
        return offset < a_width or pitch - offset < b_width
    return True
