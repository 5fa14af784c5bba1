"""Zero-copy bridges between NumPy, CuPy, torch and any `__dlpack__` object, where bare `from_dlpack` goes wrong.

Knows the array libraries and DLPack. Must not know kernels, plans or the package's own Array, and imports neither torch
nor CuPy before a call needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy

_GPU_MEMORY = (2, 10, 13)  # DLPack's numbers for CUDA, ROCm and CUDA managed memory
_ACCEPTED = (
    "a NumPy array (native byte order, not masked), a CuPy array, a dense torch tensor on cpu or cuda, "
    "or an object with __dlpack__ and __dlpack_device__"
)
_INSTALL = {
    "torch": "pip install 'rmsnorm-raw[torch]'",
    "cupy": "pip install 'rmsnorm-raw[cuda13]' (or cuda12, rocm: the one that fits the GPU)",
}


def to_torch(array: Any, *, dtype: Any = None, copy: bool | None = None) -> Any:
    """`array` as a torch tensor on the device where it is: NumPy memory becomes a CPU tensor, GPU memory a cuda tensor.

    Args:
        array: any shape; NumPy, CuPy, torch or any `__dlpack__` object. A torch tensor is returned as it is.
        dtype: other meaning for the same bits, such as "bfloat16" for uint16 or "float8_e4m3fn" for uint8 (a name, or a
            NumPy, ml_dtypes or torch dtype). Values are never converted. Default: the array's own dtype.
        copy: None shares memory and copies only what torch cannot view (negative or odd strides, pending conjugation or
            negation); False never copies; True always returns fresh memory, ordered on the source's current stream.

    The result keeps the source alive, and torch's current stream waits for the source's. JAX arrays count as immutable
    but are exported as writable memory: do not write to the result.

    Raises:
        TypeError: not an array as listed, or a dtype of another item size.
        BufferError: a read-only NumPy array without copy=True, or pending conjugation or negation with copy=False.
        ValueError: copy=False and strides that torch cannot view.
        RuntimeError: no torch, or GPU memory and a torch without that GPU.
    """
    torch = _library("torch")
    kind = _kind(array)
    if kind == "torch" and dtype is None:
        return array.clone() if copy else array
    if kind == "dlpack":
        return to_torch(_import(torch, _producer(array, copy)), dtype=dtype, copy=copy)
    _refuse_read_only(array, kind, copy)
    # torch.from_dlpack ends the process on a negative stride instead of raising.
    if kind != "torch" and any(stride < 0 or stride % array.itemsize for stride in array.strides):
        if copy is False:
            raise ValueError(f"torch cannot view strides of {array.strides} bytes: pass copy=None or copy=True")
        copy = True
    bits, name = _export(array, kind, copy)
    tensor = bits if kind == "torch" else _import(torch, bits)
    return _restore(tensor, name, dtype, _torch_dtype)


def to_cupy(array: Any, *, dtype: Any = None, copy: bool | None = None) -> Any:
    """`array` as a CuPy array: GPU memory is shared on its own device, CPU memory is sent to the current GPU.

    Args:
        array: any shape; NumPy, CuPy, torch or any `__dlpack__` object. A CuPy array is returned as it is.
        dtype: other meaning for the same bits, as in `to_torch`. By default bfloat16 arrives as ml_dtypes.bfloat16, or
            as uint16 bits without ml_dtypes or with NumPy < 2.1.2; float8 always as uint8, since CuPy has no float8.
        copy: None shares GPU memory and copies CPU memory; False never copies; True always returns fresh memory.

    Tensors that require grad arrive detached. The result keeps shared memory alive, and CuPy's current stream waits for
    the source's.

    Raises:
        TypeError: not an array as listed, a dtype of another item size, or one that CuPy lacks.
        BufferError: a read-only NumPy array without copy=True, or pending conjugation or negation with copy=False.
        ValueError: CPU memory and copy=False.
        RuntimeError: no CuPy, or no GPU that it can use.
    """
    cupy = _library("cupy")
    kind = _kind(array)
    if kind == "cupy" and dtype is None:
        return _copied(array, kind) if copy else array
    _refuse_read_only(array, kind, copy)
    moves = _moves(array, copy, to_gpu=True)
    try:
        cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise RuntimeError(f"CuPy finds no usable GPU ({error}): install its driver, or stay with to_numpy") from error
    if kind == "dlpack" and not moves:
        return to_cupy(_import(cupy, _producer(array, copy)), dtype=dtype, copy=copy)
    if kind == "dlpack":
        array, kind = to_numpy(array), "numpy"
    bits, name = _export(array, kind, None if moves else copy)
    if moves:
        bits = cupy.asarray(bits.numpy() if kind == "torch" else bits)
    elif kind == "torch":
        bits = _import(cupy, bits)
    return _restore(bits, name, dtype, _cupy_dtype)


def to_numpy(array: Any, *, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
    """`array` as a NumPy array: CPU memory is shared, GPU memory is copied to the host (which waits for the GPU).

    Args:
        array: any shape; NumPy, CuPy, torch or any `__dlpack__` object. A NumPy array is returned as it is, read-only
            ones included.
        dtype: other meaning for the same bits, as in `to_torch`. By default bfloat16 and float8 arrive as ml_dtypes'
            types, or as uint16 and uint8 bits without ml_dtypes.
        copy: None shares CPU memory and copies GPU memory; False never copies; True always returns fresh memory.

    Tensors that require grad arrive detached. The result keeps shared memory alive; it is read-only where the source
    (JAX, DLPack before 1.0) does not say that it may be written.

    Raises:
        TypeError: not an array as listed, a dtype of another item size, or one that NumPy lacks.
        BufferError: pending conjugation or negation with copy=False.
        ValueError: GPU memory and copy=False.
        RuntimeError: GPU memory of a foreign library, and no CuPy to fetch it.
    """
    kind = _kind(array)
    if kind == "numpy" and dtype is None:
        return array.copy() if copy else array
    moves = _moves(array, copy, to_gpu=False)
    if kind == "dlpack":
        local = to_cupy(array) if moves else _host_import(array, copy)
        return to_numpy(local, dtype=dtype, copy=copy)
    bits, name = _export(array, kind, None if moves else copy)
    if kind == "torch":
        bits = bits.cpu().numpy()
    elif kind == "cupy":
        bits = bits.get()
    return _restore(bits, name, dtype, _numpy_dtype)


def _kind(array: Any) -> str:
    """The library of `array`; TypeError for what no bridge takes. A library that is not loaded cannot have made it."""
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    detail = f"of dtype {getattr(array, 'dtype', None)}"
    if isinstance(array, getattr(torch, "Tensor", ())):
        if array.layout is torch.strided and array.device.type in ("cpu", "cuda"):
            return "torch"
        detail = f"of layout {array.layout} on {array.device}"
    elif isinstance(array, getattr(cupy, "ndarray", ())):
        return "cupy"
    elif isinstance(array, numpy.ndarray):
        if array.dtype.isnative and not isinstance(array, numpy.ma.MaskedArray):
            return "numpy"
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return "dlpack"
    raise TypeError(f"expected {_ACCEPTED}; got {type(array).__module__}.{type(array).__qualname__} {detail}")


def _export(array: Any, kind: str, copy: bool | None) -> tuple[Any, str]:
    """`array` without what DLPack cannot say (gradient, lazy bits, bf16, fp8), and the name of its true dtype."""
    if kind == "torch":
        if copy is False and (array.is_conj() or array.is_neg()):
            raise BufferError("resolving a pending conjugation or negation copies: pass copy=None or True")
        array = array.detach().clone() if copy else array.detach()
        array = array.resolve_conj().resolve_neg()
    elif copy:
        array = _copied(array, kind)
    name = _dtype_name(array.dtype)
    carrier = _carrier(name)
    return array.view(_torch_dtype(carrier) if kind == "torch" else carrier), name


def _restore(bits: Any, name: str, dtype: Any, native: Callable[[str], Any]) -> Any:
    """`bits` viewed as `dtype`, by default as `name`, or as plain bits where the library has no such dtype."""
    wanted = name if dtype is None else _dtype_name(dtype)
    size, wanted_size = (numpy.dtype(_carrier(each)).itemsize for each in (name, wanted))
    if size != wanted_size:
        raise TypeError(f"dtype= keeps the bits: {name} ({size} bytes) cannot become {wanted} ({wanted_size} bytes)")
    target = native(wanted)
    if target is None and dtype is None:
        target = native(_carrier(name))
    if target is None:
        raise TypeError(f"{type(bits).__module__} has no {wanted} here: leave dtype= out to get {_carrier(wanted)}")
    return bits if bits.dtype == target else bits.view(target)


def _import(library: Any, producer: Any) -> Any:
    """`producer` through `library.from_dlpack`, which passes its own current stream (1 or 0 by default, by vendor)."""
    kind, index = producer.__dlpack_device__()
    with contextlib.ExitStack() as guards:
        if kind in _GPU_MEMORY:
            torch: Any = sys.modules.get("torch")
            cupy: Any = sys.modules.get("cupy")
            if library is torch and not torch.cuda.is_available():
                raise RuntimeError("this torch sees no GPU: install a build for your GPU, or pass to_numpy(array)")
            # Both sides look up "the current stream" on the current device; torch refuses to export from any other.
            if torch is not None and torch.cuda.is_available():
                guards.enter_context(torch.cuda.device(index))
            if cupy is not None:
                guards.enter_context(cupy.cuda.Device(index))
        return library.from_dlpack(producer)


def _host_import(array: Any, copy: bool | None) -> numpy.ndarray:
    """A foreign CPU array as NumPy shares it, through `__array__` for bf16 and fp8, whose DLPack codes NumPy lacks."""
    try:
        return numpy.from_dlpack(_producer(array, copy))
    except (BufferError, RuntimeError) as error:
        if not hasattr(array, "__array__"):
            raise TypeError(f"NumPy cannot import it ({error}): export its bits and pass dtype=") from error
        return numpy.array(array, copy=False if copy is False else None)


class _NoCopy:
    """A foreign producer that is told never to copy; not every `from_dlpack` can pass that on."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        try:
            return self._array.__dlpack__(**{**options, "copy": False})
        except TypeError:  # older than DLPack 1.0, which brought copy=: such a producer only ever shares
            return self._array.__dlpack__(**options)


def _producer(array: Any, copy: bool | None) -> Any:
    return _NoCopy(array) if copy is False else array


def _copied(array: Any, kind: str) -> Any:
    # CuPy copies to the current device, not to the array's own.
    with array.device if kind == "cupy" else contextlib.nullcontext():
        return array.copy()


def _moves(array: Any, copy: bool | None, *, to_gpu: bool) -> bool:
    """Whether `array` has to change between CPU and GPU; ValueError if that is forbidden."""
    on_gpu = array.__dlpack_device__()[0] in _GPU_MEMORY
    if on_gpu != to_gpu and copy is False:
        here, there = ("GPU", "CPU") if on_gpu else ("CPU", "GPU")
        raise ValueError(f"{here} memory has to be copied to the {there}: pass copy=None or copy=True")
    return on_gpu != to_gpu


def _refuse_read_only(array: Any, kind: str, copy: bool | None) -> None:
    if kind == "numpy" and not copy and not array.flags.writeable:
        raise BufferError("the NumPy array is read-only, which torch and CuPy cannot express: pass copy=True")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"{name} cannot be imported ({error}): {_INSTALL[name]}") from error


def _carrier(name: str) -> str:
    """The dtype that crosses for `name`: unsigned integers for those that NumPy and CuPy do not have of their own."""
    return "uint16" if name == "bfloat16" else "uint8" if name.startswith("float8_") else name


def _dtype_name(dtype: Any) -> str:
    """The one name of a dtype in every library: NumPy's spelling, which torch and ml_dtypes share."""
    name = str(dtype).removeprefix("torch.")
    if _carrier(name) != name:
        return name
    known = numpy.dtype(dtype if name == str(dtype) else name)
    if not (_carrier(known.name) != known.name or (known.kind in "biufc" and known.isnative)):
        raise TypeError(f"dtype {dtype} cannot cross between libraries: numbers in native byte order can")
    return known.name


def _torch_dtype(name: str) -> Any:
    return getattr(sys.modules["torch"], name, None)


def _numpy_dtype(name: str) -> numpy.dtype | None:
    if _carrier(name) == name:
        return numpy.dtype(name)
    try:
        return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        return None


def _cupy_dtype(name: str) -> numpy.dtype | None:
    # CuPy takes ml_dtypes' bfloat16 only from this NumPy on, and no float8.
    old = numpy.lib.NumpyVersion(numpy.__version__) < "2.1.2"
    return None if name.startswith("float8_") or (old and name == "bfloat16") else _numpy_dtype(name)
