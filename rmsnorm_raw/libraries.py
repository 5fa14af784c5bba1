"""The array libraries: how each one's arrays are looked at, allocated, copied and handed back.

Knows: NumPy, CuPy, torch and DLPack, each looked up by the type of the argument, never imported for its own sake.
Must not: judge whether an operand fits a call; the door does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")
ACCEPTED = "a NumPy or CuPy array, a torch CPU or GPU tensor, or another object with __dlpack__"


@dataclass(frozen=True)
class Device:
    kind: str  # "host" or "gpu"
    index: int

    def __str__(self) -> str:
        return "the host" if self.kind == "host" else f"GPU {self.index}"


HOST = Device("host", 0)


@dataclass(slots=True)
class Array:
    """A view of somebody's memory. Strides count elements; `owner` keeps it alive and is what is handed back."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    library: Any
    owner: Any
    copied_from: tuple[int, int] | None = None  # the bytes of the caller's own array, where this is a copy of it

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Library:
    """What is alike in the libraries whose arrays are looked at directly."""

    name = ""

    def view(self, obj: Any, name: str) -> Array:
        raise NotImplementedError

    def signature(self, obj: Any) -> tuple:
        """What decides about an array; type, shape, strides, dtype come first."""
        raise NotImplementedError

    def pointer(self, obj: Any) -> int:
        raise NotImplementedError

    def pointer_text(self, name: str) -> str:
        """`pointer` of the variable `name`, as an expression."""
        raise NotImplementedError

    def guard_text(self, arrays: dict[str, Any], written: Sequence[str], space: dict[str, Any]) -> str:
        """An expression that is true where the variables named hold arrays of the same properties as these (their
        addresses aside), and those in `written` may be written to. What the expression needs goes into `space`."""
        raise NotImplementedError

    def guarded_pointer_text(self, name: str) -> str:
        """`pointer_text` behind a guard that has looked at that variable."""
        return self.pointer_text(name)

    def extent(self, obj: Any) -> tuple[int, int]:
        """The first byte and the one behind the last."""
        raise NotImplementedError

    def written(self, owner: Any) -> None:
        """Tells the library that an array of its own was written to."""

    def memory(self, device: Device) -> Library:
        """The library whose arrays results on that device are, until they are handed back."""
        return self

    def maker(self, shape: tuple[int, ...], dtype: str, device: Device) -> partial[Any]:
        """A function that makes a fresh array, on the device that is current where there are several."""
        raise NotImplementedError

    def stream_text(self, device: Device, space: dict[str, Any]) -> str:
        """An expression for the current stream, while that device is the current one; what it needs goes to `space`."""
        return "0"


class NumpyLibrary(Library):
    name = "NumPy"

    def view(self, obj: Any, name: str) -> Array:
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {ACCEPTED}")
        if not obj.dtype.isnative:
            raise TypeError(f"{name} is byte-swapped ({obj.dtype.str}); pass {name}.astype({obj.dtype.name!r})")
        size = max(1, obj.dtype.itemsize)
        copied_from = None
        if not obj.flags.aligned or any(s % size for s in obj.strides):
            bounds = np.lib.array_utils if hasattr(np.lib, "array_utils") else np  # moved in NumPy 2
            copied_from = getattr(bounds, "byte_bounds")(obj)  # noqa: B009
            obj = obj.copy()
        strides = tuple(s // size for s in obj.strides)
        return Array(obj.ctypes.data, obj.shape, strides, obj.dtype.name, HOST, self, obj, copied_from)

    def signature(self, obj: Any) -> tuple:
        return type(obj), obj.shape, obj.strides, obj.dtype, self.pointer(obj) & 15, obj.flags.writeable

    def pointer_text(self, name: str) -> str:
        return f"{name}.__array_interface__['data'][0]"

    def guard_text(self, arrays: dict[str, Any], written: Sequence[str], space: dict[str, Any]) -> str:
        terms = [_compare(name, obj, ("shape", "strides", "dtype"), space) for name, obj in arrays.items()]
        return " and ".join(terms + [f"{name}.flags.writeable" for name in arrays if name in written])

    def pointer(self, obj: Any) -> int:
        return obj.__array_interface__["data"][0]

    def extent(self, obj: Any) -> tuple[int, int]:
        return _extent(self.pointer(obj), obj.shape, obj.strides, obj.dtype.itemsize)

    def maker(self, shape: tuple[int, ...], dtype: str, device: Device) -> partial[Any]:
        return partial(np.empty, shape, _numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return np.zeros(shape, _numpy_dtype(dtype))

    def contiguous(self, owner: Any) -> Any:
        return np.array(owner, order="C", copy=True)

    def refuse_to_write(self, owner: Any, name: str) -> None:
        if not owner.flags.writeable:
            raise ValueError(f"{name} is read-only; pass a writable array")

    def stream(self, device: Device) -> int:
        return 0

    def finish(self, owner: Any) -> Any:
        return owner


class CupyLibrary(Library):
    name = "CuPy"

    def view(self, obj: Any, name: str) -> Array:
        size = max(1, obj.dtype.itemsize)
        strides = tuple(s // size for s in obj.strides)
        device = Device("gpu", obj.device.id)
        return Array(obj.data.ptr, obj.shape, strides, obj.dtype.name, device, self, obj)

    def signature(self, obj: Any) -> tuple:
        memory = obj.data
        return type(obj), obj.shape, obj.strides, obj.dtype, memory.device_id, memory.ptr & 15

    def pointer_text(self, name: str) -> str:
        return f"{name}.data.ptr"

    def guard_text(self, arrays: dict[str, Any], written: Sequence[str], space: dict[str, Any]) -> str:
        terms = []
        for name, obj in arrays.items():
            contiguous = getattr(obj, "_c_contiguous", False)  # read in a third of the time that strides take
            terms += [_compare(name, obj, ("shape",) if contiguous else ("shape", "strides"), space)]
            terms += [f"{name}._c_contiguous"] if contiguous else []
            space[f"dtype_{name}"] = obj.dtype
            terms += [f"{name}.dtype is dtype_{name} and (m_{name} := {name}.data).device_id == {obj.data.device_id}"]
        return " and ".join(terms)

    def guarded_pointer_text(self, name: str) -> str:
        return f"m_{name}.ptr"

    def pointer(self, obj: Any) -> int:
        return obj.data.ptr

    def extent(self, obj: Any) -> tuple[int, int]:
        return _extent(obj.data.ptr, obj.shape, obj.strides, obj.dtype.itemsize)

    def maker(self, shape: tuple[int, ...], dtype: str, device: Device) -> partial[Any]:
        import cupy

        return partial(cupy.ndarray, shape, _numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        import cupy

        with cupy.cuda.Device(like.device.index):
            return cupy.zeros(shape, _numpy_dtype(dtype))

    def contiguous(self, owner: Any) -> Any:
        with owner.device:
            return owner.copy(order="C")

    def refuse_to_write(self, owner: Any, name: str) -> None:
        pass

    def stream(self, device: Device) -> int:
        import cupy

        with cupy.cuda.Device(device.index):
            return cupy.cuda.get_current_stream().ptr

    def stream_text(self, device: Device, space: dict[str, Any]) -> str:
        import cupy

        space["current_stream"] = cupy.cuda.get_current_stream
        return "current_stream().ptr"

    def finish(self, owner: Any) -> Any:
        return owner


class TorchLibrary(Library):
    name = "torch"

    def view(self, obj: Any, name: str) -> Array:
        import torch

        kind = obj.device.type
        if obj.layout is not torch.strided:
            raise TypeError(f"{name} is a sparse tensor ({obj.layout}); pass {name}.to_dense()")
        if kind not in ("cpu", "cuda"):
            raise TypeError(f"{name} is a {kind} tensor; pass {ACCEPTED}")
        if obj.is_nested:
            raise TypeError(f"{name} is a nested tensor; pass {ACCEPTED}")
        if obj.is_neg():
            obj = obj.resolve_neg()
        device = HOST if kind == "cpu" else Device("gpu", obj.device.index)
        dtype = str(obj.dtype).removeprefix("torch.")
        return Array(obj.data_ptr(), tuple(obj.shape), obj.stride(), dtype, device, self, obj)

    def signature(self, obj: Any) -> tuple:
        import torch

        place = obj.device, obj.data_ptr() & 15, obj.is_neg()
        graph = obj.requires_grad, obj.is_leaf, torch.is_grad_enabled()
        return type(obj), obj.shape, obj.stride(), obj.dtype, *place, *graph

    def pointer_text(self, name: str) -> str:
        return f"{name}.data_ptr()"

    def guard_text(self, arrays: dict[str, Any], written: Sequence[str], space: dict[str, Any]) -> str:
        """torch.compile's own guard compares types, dtypes, devices, shapes, strides, dispatch keys and whether a
        gradient is needed, of all tensors in a fifth of the time that their attributes take. It is not public: where it
        is not as expected, these."""
        import torch

        terms = []
        # Of tensors that need a gradient, what may be done depends on the mode.
        if any(obj.requires_grad for obj in arrays.values()):
            space["in_grad_mode"] = torch.is_grad_enabled
            terms += ["in_grad_mode()" if torch.is_grad_enabled() else "not in_grad_mode()"]
        if hasattr(torch.autograd.forward_ad, "_current_level"):  # while it is at work, any tensor may have a tangent
            space["forward_ad"] = torch.autograd.forward_ad
            terms += ["forward_ad._current_level < 0"]
        check = _tensor_guard(torch, list(arrays.values()))
        if check is not None:
            space["check"] = check
            return " and ".join([*terms, f"check({', '.join(arrays)})"])
        space["transforms"] = torch._C._are_functorch_transforms_active
        attributes = ("shape", "stride()", "dtype", "device", "is_neg()", "requires_grad")
        terms += ["not transforms()", *(_compare(name, obj, attributes, space) for name, obj in arrays.items())]
        return " and ".join(terms)

    def pointer(self, obj: Any) -> int:
        return obj.data_ptr()

    def extent(self, obj: Any) -> tuple[int, int]:
        size = obj.element_size()
        return _extent(obj.data_ptr(), obj.shape, [step * size for step in obj.stride()], size)

    def maker(self, shape: tuple[int, ...], dtype: str, device: Device) -> partial[Any]:
        import torch

        kind, where = getattr(torch, dtype), torch.device(self._device(device))
        strides = contiguous_strides(shape)
        try:  # what torch.compile's code calls: 1.1 µs, where torch.empty takes 4 to 6 to read its arguments
            guards = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
            empty = getattr(guards, f"_empty_strided_{where.type}")
            if device.kind == "host":
                empty((1,), (1,), kind)
            return partial(empty, shape, strides, kind)
        except (AttributeError, TypeError):
            return partial(torch.empty_strided, shape, strides, dtype=kind, device=where)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device(like.device))

    def contiguous(self, owner: Any) -> Any:
        import torch

        return owner.detach().clone(memory_format=torch.contiguous_format)

    def refuse_to_write(self, owner: Any, name: str) -> None:
        import torch

        if owner.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} requires a gradient, which writing into it would lose; pass {name}.detach()")

    def written(self, owner: Any) -> None:
        import torch

        torch.autograd.graph.increment_version(owner)  # so that a backward which saved the old values says so

    def stream(self, device: Device) -> int:
        if device.kind == "host":
            return 0
        import torch

        return torch.cuda.current_stream(device.index).cuda_stream

    def stream_text(self, device: Device, space: dict[str, Any]) -> str:
        if device.kind == "host":
            return "0"
        import torch

        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of current_stream's time
        space["current_stream"] = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)
        return f"current_stream({device.index})"

    def finish(self, owner: Any) -> Any:
        return owner

    def _device(self, device: Device) -> Any:
        return "cpu" if device.kind == "host" else f"cuda:{device.index}"


class ExchangeLibrary(Library):
    """Any other library: operands come in by __dlpack__ as NumPy or CuPy memory, results go back by its from_dlpack."""

    name = "DLPack"

    def __init__(self, from_dlpack: Any):
        self.from_dlpack = from_dlpack

    def view(self, obj: Any, name: str) -> Array:
        inner = _import_dlpack(obj, name)
        array = library_of(inner, name).view(inner, name)
        array.library = self
        return array

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return self.memory(like.device).zeros(shape, dtype, like)

    def contiguous(self, owner: Any) -> Any:
        return (_NUMPY if isinstance(owner, np.ndarray) else _CUPY).contiguous(owner)

    def refuse_to_write(self, owner: Any, name: str) -> None:
        raise ValueError(f"{name} is read-only: only NumPy, CuPy and torch arrays are written in place")

    def stream(self, device: Device) -> int:
        return self.memory(device).stream(device)

    def finish(self, owner: Any) -> Any:
        if self.from_dlpack is None:
            return owner
        if owner.dtype.name == "bfloat16":  # NumPy and CuPy cannot export it: the bits travel, the library restores
            return self.from_dlpack(owner.view(np.uint16)).view(owner.dtype)
        return self.from_dlpack(owner)

    def memory(self, device: Device) -> Any:
        return _NUMPY if device.kind == "host" else _CUPY


class Outlines(Library):
    """Arrays that have no memory: a call with them is checked and planned like any other, and ends in `programs`."""

    name = "outline"

    def __init__(self) -> None:
        self.programs: dict[Any, None] = {}  # in the order in which they were planned

    def view(self, obj: Any, name: str) -> Array:
        return Array(0, obj.shape, contiguous_strides(obj.shape), obj.dtype, obj.device, self, obj)

    def stream(self, device: Device) -> int:
        return 0

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Any:
        return None

    def finish(self, owner: Any) -> Any:
        return None


@dataclass(frozen=True)
class Outline:
    """What is known of an array before there is one."""

    shape: tuple[int, ...]
    dtype: str
    device: Device
    library: Outlines


_NUMPY, _CUPY, _TORCH = NumpyLibrary(), CupyLibrary(), TorchLibrary()
_BY_ROOT = {"numpy": _NUMPY, "cupy": _CUPY, "torch": _TORCH}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _compare(name: str, obj: Any, attributes: tuple[str, ...], space: dict[str, Any]) -> str:
    """An expression that compares the type and attributes of the variable `name` with those of `obj`."""
    space[f"{name}_type"] = type(obj)
    terms = [f"type({name}) is {name}_type"]
    for number, attribute in enumerate(attributes):
        value = getattr(obj, attribute.removesuffix("()"))
        space[f"{name}_{number}"] = value() if attribute.endswith("()") else value
        terms.append(f"{name}.{attribute} == {name}_{number}")
    return " and ".join(terms)


def _tensor_guard(torch: Any, tensors: list[Any]) -> Callable[..., bool] | None:
    try:
        like = [
            torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
            if type(tensor) is torch.nn.Parameter
            else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in tensors
        ]
        guards = torch._C._dynamo.guards.TensorGuards(*like, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return guards.check if guards.check(*tensors) else None
    except Exception:
        return None


def _extent(pointer: int, shape: Any, strides: Any, size: int) -> tuple[int, int]:
    """The first byte and the one behind the last; strides in bytes."""
    low = high = pointer
    for length, stride in zip(shape, strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + size


def known_library_of(obj: Any) -> Any:
    """NumPy, CuPy or torch; KeyError for all else."""
    library = _library_of_type(type(obj))
    if library is None:
        raise KeyError(type(obj))
    return library


def library_of(obj: Any, name: str) -> Any:
    """The library that an argument belongs to; TypeError where there is none for it."""
    library = _library_of_type(type(obj))
    if library is not None:
        return library
    if isinstance(obj, Outline):
        return obj.library
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
        try:
            known = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"{name} is {dtype!r}; it must be one of {', '.join(DTYPES)}") from None
        text = known.name if known.isnative else f"byte-swapped {known.name}"
    if text not in DTYPES:
        raise TypeError(f"{name} is {text}; it must be one of {', '.join(DTYPES)}")
    return text
