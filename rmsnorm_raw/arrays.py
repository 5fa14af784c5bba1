"""The door: arrays of any library become pointers, shapes and dtypes, and everything a call can get wrong is refused here.

Knows: NumPy, CuPy, torch and DLPack, each looked up by the type of the argument, never imported for its own sake.
Must not: know kernels or plans. What has passed this door is not checked again.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")
ACCEPTED = "a NumPy or CuPy array, a torch CPU or GPU tensor, or another object with __dlpack__"


class Device(NamedTuple):
    kind: str  # "host" or "gpu"
    index: int

    def __str__(self) -> str:
        return "the host" if self.kind == "host" else f"GPU {self.index}"


HOST = Device("host", 0)


@dataclass(slots=True)
class Array:
    """A view of somebody's memory. Strides count elements; `owner` keeps the memory alive and is what is handed back."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    library: Any
    owner: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class Rows:
    """An array seen as rows of contiguous columns, `pitch` elements apart (any sign, 0 included)."""

    pointer: int
    pitch: int
    dtype: str
    array: Array

    @property
    def owner(self) -> Any:
        return self.array.owner


ABSENT = Rows(0, 0, "", Array(0, (), (), "", HOST, None, None))


# ------------------------------------------------------------------------------------------------ libraries


class NumpyLibrary:
    name = "NumPy"

    def view(self, obj: Any, name: str) -> Array:
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {ACCEPTED}")
        if not obj.dtype.isnative:
            raise TypeError(f"{name} is byte-swapped ({obj.dtype.str}); pass {name}.astype({obj.dtype.name!r})")
        size = obj.dtype.itemsize
        if not obj.flags.aligned or any(s % size for s in obj.strides):
            obj = obj.copy()
        strides = tuple(s // size for s in obj.strides)
        return Array(obj.ctypes.data, obj.shape, strides, obj.dtype.name, HOST, self, obj)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return np.empty(shape, _numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return np.zeros(shape, _numpy_dtype(dtype))

    def contiguous(self, owner: Any) -> Any:
        return np.array(owner, order="C", copy=True)

    def writable(self, owner: Any) -> bool:
        return owner.flags.writeable

    def stream(self, device: Device) -> int:
        return 0

    def finish(self, owner: Any) -> Any:
        return owner


class CupyLibrary:
    name = "CuPy"

    def view(self, obj: Any, name: str) -> Array:
        size = obj.dtype.itemsize
        strides = tuple(s // size for s in obj.strides)
        device = Device("gpu", obj.device.id)
        return Array(obj.data.ptr, obj.shape, strides, obj.dtype.name, device, self, obj)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        import cupy

        with cupy.cuda.Device(like.device.index):
            return cupy.empty(shape, _numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        import cupy

        with cupy.cuda.Device(like.device.index):
            return cupy.zeros(shape, _numpy_dtype(dtype))

    def contiguous(self, owner: Any) -> Any:
        with owner.device:
            return owner.copy(order="C")

    def writable(self, owner: Any) -> bool:
        return True

    def stream(self, device: Device) -> int:
        import cupy

        with cupy.cuda.Device(device.index):
            return cupy.cuda.get_current_stream().ptr

    def finish(self, owner: Any) -> Any:
        return owner


class TorchLibrary:
    name = "torch"

    def view(self, obj: Any, name: str) -> Array:
        import torch

        kind = obj.device.type
        if obj.layout is not torch.strided:
            raise TypeError(f"{name} is a sparse tensor ({obj.layout}); pass {name}.to_dense()")
        if kind not in ("cpu", "cuda"):
            raise TypeError(f"{name} is a {kind} tensor; pass {ACCEPTED}")
        if obj.is_neg():
            obj = obj.resolve_neg()
        device = HOST if kind == "cpu" else Device("gpu", obj.device.index)
        dtype = str(obj.dtype).removeprefix("torch.")
        return Array(obj.data_ptr(), tuple(obj.shape), obj.stride(), dtype, device, self, obj)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device(like.device))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device(like.device))

    def contiguous(self, owner: Any) -> Any:
        import torch

        return owner.detach().clone(memory_format=torch.contiguous_format)

    def writable(self, owner: Any) -> bool:
        return True

    def stream(self, device: Device) -> int:
        if device.kind == "host":
            return 0
        import torch

        return torch.cuda.current_stream(device.index).cuda_stream

    def finish(self, owner: Any) -> Any:
        return owner

    def _device(self, device: Device) -> Any:
        return "cpu" if device.kind == "host" else f"cuda:{device.index}"


class ExchangeLibrary:
    """Any other library: operands come in by __dlpack__ as NumPy or CuPy memory, results go back by its from_dlpack."""

    name = "DLPack"

    def __init__(self, from_dlpack: Any):
        self.from_dlpack = from_dlpack

    def view(self, obj: Any, name: str) -> Array:
        inner = _import_dlpack(obj, name)
        array = library_of(inner, name).view(inner, name)
        array.library = self
        return array

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return self._inner(like.device).empty(shape, dtype, like)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return self._inner(like.device).zeros(shape, dtype, like)

    def contiguous(self, owner: Any) -> Any:
        return (_NUMPY if isinstance(owner, np.ndarray) else _CUPY).contiguous(owner)

    def writable(self, owner: Any) -> bool:
        return False

    def stream(self, device: Device) -> int:
        return self._inner(device).stream(device)

    def finish(self, owner: Any) -> Any:
        if self.from_dlpack is None:
            return owner
        if owner.dtype.name == "bfloat16":  # NumPy and CuPy cannot export it: the bits travel, the library restores
            return self.from_dlpack(owner.view(np.uint16)).view(owner.dtype)
        return self.from_dlpack(owner)

    @staticmethod
    def _inner(device: Device) -> Any:
        return _NUMPY if device.kind == "host" else _CUPY


_NUMPY, _CUPY, _TORCH = NumpyLibrary(), CupyLibrary(), TorchLibrary()
_BY_ROOT = {"numpy": _NUMPY, "cupy": _CUPY, "torch": _TORCH}


def library_of(obj: Any, name: str) -> Any:
    """The library that an argument belongs to; TypeError where there is none for it."""
    library = _library_of_type(type(obj))
    if library is not None:
        return library
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return ExchangeLibrary(_from_dlpack_of(obj))
    raise TypeError(f"{name} is a {type(obj).__module__}.{type(obj).__qualname__}; pass {ACCEPTED}")


@lru_cache(maxsize=256)
def _library_of_type(kind: type) -> Any:
    if issubclass(kind, np.generic):
        return None
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _BY_ROOT and base.__name__ in ("ndarray", "Tensor"):
            return _BY_ROOT[root]
    return None


def _from_dlpack_of(obj: Any) -> Any:
    if hasattr(obj, "__array_namespace__"):
        namespace = obj.__array_namespace__()
        if hasattr(namespace, "from_dlpack"):
            return namespace.from_dlpack
    module = sys.modules.get(type(obj).__module__.partition(".")[0])
    return getattr(module, "from_dlpack", None)


def _import_dlpack(obj: Any, name: str) -> Any:
    kind = int(obj.__dlpack_device__()[0])
    if kind in (1, 3, 11):  # host memory, pinned by CUDA or ROCm or not
        if str(getattr(obj, "dtype", "")) == "bfloat16":  # NumPy's from_dlpack has no name for it
            return np.asarray(obj)
        return np.from_dlpack(obj)
    if kind in (2, 10, 13):
        from .devices import cupy as device

        return device.require_cupy().from_dlpack(obj)
    raise TypeError(f"{name} lies on a device of DLPack type {kind}; pass {ACCEPTED}")


@lru_cache(maxsize=16)
def _numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def dtype_name(dtype: Any, name: str) -> str:
    """The name of a dtype given as a string, a NumPy dtype or type, or a torch dtype."""
    text = str(dtype)
    if text.startswith("torch."):
        text = text.removeprefix("torch.")
    elif not isinstance(dtype, str):
        text = np.dtype(dtype).name
    if text not in DTYPES:
        raise TypeError(f"{name} is {text}; it must be one of {', '.join(DTYPES)}")
    return text


# ------------------------------------------------------------------------------------------------ the door


class Door:
    """What one call has passed in: views by name, all on x's device and in dtypes that go together."""

    def __init__(self, x: Any, name: str = "x"):
        self.library = library_of(x, name)
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
            raise TypeError(f"rstd is {view.dtype}; for x of {self.x.dtype} it must be {expected}, as the forward gave it")
        if view.shape not in (self.shape[:-1], (self.rows,)):
            raise ValueError(
                f"rstd has shape {view.shape}, x has {self.shape}; it must be {self.shape[:-1]} or ({self.rows},)"
            )
        if not _is_contiguous(view):
            view = self._copy(view)
        rows = Rows(view.pointer, 1, view.dtype, view)
        self._named.append(("rstd", rows))
        return rows

    def output(self, obj: Any, name: str, shape: tuple[int, ...], dtype: str, in_place_of: tuple[str, ...] = ()) -> Any:
        """Checks a caller's own output array; None stays None, to be allocated once all checks have passed.

        It may be exactly one of the operands `in_place_of`; any other overlap with an operand is refused.
        """
        if obj is None:
            return None
        library = library_of(obj, name)
        if library is not self.library:
            raise TypeError(f"{name} is a {library.name} array, x is {self.library.name}; they must be of one library")
        view = library.view(obj, name)
        if not library.writable(obj):
            raise ValueError(f"{name} is read-only; pass a writable array")
        if view.owner is not obj:
            raise ValueError(f"{name} cannot be written in place (misaligned, or a lazily negated tensor)")
        if view.device != self.device:
            raise ValueError(f"{name} is on {view.device}, x is on {self.device}")
        if view.dtype != dtype:
            raise TypeError(f"{name} is {view.dtype}; the result is {dtype}")
        if view.shape != shape:
            raise ValueError(f"{name} has shape {view.shape}; the result has {shape}")
        pitch = _row_pitch(view)
        if pitch is None or (abs(pitch) < shape[-1] and view.size > shape[-1]):
            raise ValueError(f"{name} has strides {view.strides} (in elements); its rows must be contiguous and apart")
        rows = Rows(view.pointer, pitch, view.dtype, view)
        for other_name, other in self._named:
            if _overlap(rows, other) and not (other_name in in_place_of and _same_memory(rows, other)):
                allowed = f"; only exactly {' or '.join(in_place_of)} may be written in place" if in_place_of else ""
                raise ValueError(f"{name} overlaps {other_name} in memory{allowed}")
        self._named.append((name, rows))
        return rows

    def allocate(self, given: Rows | None, shape: tuple[int, ...], dtype: str) -> Rows:
        """The caller's output, or a fresh one from the caller's library."""
        if given is not None:
            return given
        owner = self.library.empty(shape, dtype, self.x)
        view = self._inner_view(owner)
        return Rows(view.pointer, shape[-1] if shape else 1, dtype, view)

    def zeros(self, given: Rows | None, shape: tuple[int, ...], dtype: str) -> Rows:
        rows = self.allocate(given, shape, dtype)
        if given is None:
            rows.array.owner = self.library.zeros(shape, dtype, self.x)
        else:
            rows.array.owner[...] = 0
        return rows

    def workspace(self, obj: Any, needed: int) -> tuple[int, Any]:
        """Pointer and owner of scratch memory of at least `needed` bytes: the caller's, or a fresh one."""
        if needed == 0:
            return 0, None
        if obj is None:
            owner = self.library.empty((-(-needed // 4),), "float32", self.x)
            return self._inner_view(owner).pointer, owner
        view = library_of(obj, "workspace").view(obj, "workspace")
        have = view.size * _item_size(obj)
        if view.device != self.device:
            raise ValueError(f"workspace is on {view.device}, x is on {self.device}")
        if not _is_contiguous(view) or not view.library.writable(obj):
            raise ValueError("workspace must be contiguous and writable")
        if have < needed or view.pointer % 16:
            raise ValueError(f"workspace has {have} bytes at an address ending in {view.pointer % 16}; "
                             f"this call needs {needed} bytes, 16-byte aligned")
        return view.pointer, obj

    def stream(self) -> int:
        return self.library.stream(self.device)

    def finish(self, rows: Rows | None) -> Any:
        """What the caller gets back."""
        return None if rows is None else self.library.finish(rows.array.owner)

    def alignment(self, extra: tuple[Rows, ...], pack: int) -> int:
        """Elements that every operand allows in one memory access, at most a pack."""
        vector = pack
        for rows in (*(rows for name, rows in self._named if name != "rstd"), *extra):
            size = SIZE[rows.dtype]
            bits = rows.pointer | abs(rows.pitch) * size | 16
            aligned = bits & -bits
            if aligned < min(16, pack * size):
                vector = min(vector, max(1, aligned // size))
        return vector

    def _view(self, obj: Any, name: str, library: Any = None, check_dtype: bool = True) -> Array:
        library = library or library_of(obj, name)
        view = library.view(obj, name)
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
        self._named.append((name, rows))
        return rows

    def _copy(self, view: Array) -> Array:
        library = view.library
        copied = library.contiguous(view.owner)
        inner = library_of(copied, "copy").view(copied, "copy")
        inner.library = library
        return inner

    def _inner_view(self, owner: Any) -> Array:
        return library_of(owner, "output").view(owner, "output")


SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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
    size = SIZE[rows.dtype]
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
    pitch = abs(a.pitch) * SIZE[a.dtype]
    if pitch and pitch == abs(b.pitch) * SIZE[b.dtype]:
        offset = (b_low - a_low) % pitch
        a_width = a.array.shape[-1] * SIZE[a.dtype]
        b_width = b.array.shape[-1] * SIZE[b.dtype]
        return offset < a_width or pitch - offset < b_width
    return True
