"""The bridges: shared memory is proved by pointers and by writing on one side, refusals by their messages."""

import gc
import subprocess
import sys
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from rmsnorm_raw.bridge import to_cupy, to_numpy, to_torch

# A bridge that warns on the happy path fails its test.
pytestmark = pytest.mark.filterwarnings("error")

FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
CPU = (1, 0)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def ml_dtypes():
    return pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")


@pytest.fixture
def cupy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what CuPy says about its environment is not the bridge's doing
        return pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


class Producer:
    """A foreign array: nothing but the two DLPack methods, and a record of what a consumer asked for."""

    def __init__(self, array, device=None):
        self.array, self.device, self.asked = array, device, []

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options)
        if self.device:  # a CPU capsule stands in for the GPU that it claims
            options = {key: value for key, value in options.items() if key != "stream"}
        return self.array.__dlpack__(**options)


class OldProducer(Producer):
    """A producer from before DLPack 1.0."""

    def __dlpack__(self, stream=None):
        self.asked.append({"stream": stream})
        return self.array.__dlpack__()


# ---------------------------------------------------------------- import and missing libraries


def test_import_loads_no_framework():
    code = "import sys, rmsnorm_raw.bridge; print([m for m in ('torch', 'cupy', 'ml_dtypes') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(("bridge", "library"), [(to_torch, "torch"), (to_cupy, "cupy")])
def test_missing_library_says_what_to_install(monkeypatch, bridge, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeError, match=rf"{library}.*pip install 'rmsnorm-raw\["):
        bridge(np.ones(3, np.float32))


def test_no_gpu_says_what_to_do(monkeypatch, cupy):
    def no_device():
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_device)
    with pytest.raises(RuntimeError, match=r"no usable GPU.*cudaErrorNoDevice.*to_numpy"):
        to_cupy(np.ones(3, np.float32))


# ---------------------------------------------------------------- sharing and copying on the CPU


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint16", "bool", "complex64"])
def test_numpy_to_torch_shares_memory(torch, dtype):
    source = np.zeros((3, 4), dtype)
    tensor = to_torch(source)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (3, 4)
    assert tensor.data_ptr() == source.ctypes.data
    source[1, 2] = 1
    assert tensor[1, 2] == 1
    tensor[2, 3] = 1
    assert source[2, 3] == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint16", "bool", "complex64"])
def test_torch_to_numpy_shares_memory(torch, dtype):
    source = torch.zeros(3, 4, dtype=getattr(torch, dtype))
    array = to_numpy(source)
    assert array.dtype == dtype
    assert array.shape == (3, 4)
    assert array.ctypes.data == source.data_ptr()
    source[1, 2] = 1
    assert array[1, 2] == 1
    array[2, 3] = 1
    assert source[2, 3] == 1


def test_the_same_library_returns_the_same_object(torch):
    array, tensor = np.ones(3, np.float32), torch.ones(3, requires_grad=True)
    assert to_numpy(array) is array
    assert to_torch(tensor) is tensor


@pytest.mark.parametrize("copy", [None, False])
def test_views_keep_their_strides(torch, copy):
    source = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert to_torch(source[::2, 1:].T, copy=copy).stride() == (1, 12)
    expanded = to_numpy(torch.ones(1).expand(4), copy=copy)
    assert expanded.strides == (0,)
    assert to_torch(np.array(3.5), copy=copy).shape == ()


def test_copy_true_is_fresh_memory(torch):
    array, tensor = np.zeros(3, np.float32), torch.zeros(3)
    copies = [to_torch(array, copy=True), to_numpy(array, copy=True), to_torch(tensor, copy=True)]
    copies += [to_numpy(tensor, copy=True), to_torch(Producer(array), copy=True), to_numpy(Producer(array), copy=True)]
    array[:], tensor[:] = 7, 7
    for each in copies:
        assert each.tolist() == [0, 0, 0]
        each[0] = 5
    assert array.tolist() == tensor.tolist() == [7, 7, 7]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_zero_size(torch, shape, dtype):
    array = to_numpy(torch.empty(shape, dtype=getattr(torch, dtype)))
    assert array.shape == shape
    tensor = to_torch(array, dtype=dtype)
    assert tensor.shape == shape
    assert tensor.dtype == getattr(torch, dtype)


def test_owner_lives_as_long_as_the_tensor(torch):
    source = np.full(1000, 3, np.float32)
    owner = weakref.ref(source)
    tensor = to_torch(source)
    del source
    gc.collect()
    assert owner() is not None
    assert tensor.eq(3).all()
    del tensor
    gc.collect()
    assert owner() is None


def test_owner_lives_as_long_as_the_array(torch):
    source = torch.full((1 << 20,), 3, dtype=torch.bfloat16)
    array = to_numpy(source, dtype="uint16")
    del source
    gc.collect()
    # The allocator would hand the freed block to one of these.
    others = [torch.zeros(1 << 20, dtype=torch.bfloat16) for _ in range(4)]
    assert len(others) == 4
    assert (array == 0x4040).all()


# ---------------------------------------------------------------- bits: bf16, fp8, dtype=


def test_bf16_shares_memory_as_ml_dtypes(torch, ml_dtypes):
    source = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    array = to_numpy(source)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.ctypes.data == source.data_ptr()
    array[0] = 4
    assert source.tolist() == [4.0, -2.5]
    back = to_torch(array)
    assert back.dtype == torch.bfloat16
    assert back.data_ptr() == source.data_ptr()


def test_bf16_without_ml_dtypes_is_carried_as_bits(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    source = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    bits = to_numpy(source)
    assert bits.dtype == np.uint16
    assert bits.tolist() == [0x3F80, 0xC020]
    assert bits.ctypes.data == source.data_ptr()
    back = to_torch(bits, dtype="bfloat16")
    assert back.tolist() == [1.0, -2.5]
    assert back.data_ptr() == source.data_ptr()
    with pytest.raises(TypeError, match=r"numpy has no bfloat16.*uint16"):
        to_numpy(source, dtype="bfloat16")


@pytest.mark.parametrize("name", FLOAT8)
def test_fp8_shares_memory_as_ml_dtypes(torch, ml_dtypes, name):
    source = torch.tensor([1.0, -0.5]).to(getattr(torch, name))
    array = to_numpy(source)
    assert array.dtype == getattr(ml_dtypes, name)
    assert array.astype(np.float32).tolist() == [1.0, -0.5]
    assert array.ctypes.data == source.data_ptr()
    assert to_torch(array).dtype == source.dtype


@pytest.mark.parametrize("name", FLOAT8)
def test_fp8_without_ml_dtypes_is_carried_as_bits(torch, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    source = torch.tensor([1.0, -0.5]).to(getattr(torch, name))
    bits = to_numpy(source)
    assert bits.dtype == np.uint8
    back = to_torch(bits, dtype=name)
    assert back.dtype == source.dtype
    assert back.data_ptr() == source.data_ptr()
    assert back.float().tolist() == [1.0, -0.5]


def test_dtype_accepts_every_spelling(torch, ml_dtypes):
    bits = np.array([0x3F80], np.uint16)
    spellings = ["bfloat16", "torch.bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]
    for spelling in spellings:
        assert to_torch(bits, dtype=spelling).dtype == torch.bfloat16
        assert to_numpy(bits, dtype=spelling).dtype == ml_dtypes.bfloat16
    assert to_torch(bits, dtype=np.float16).dtype == to_torch(bits, dtype="half").dtype == torch.float16


@pytest.mark.parametrize("carrier", ["int16", "uint16"])
def test_torch_bits_become_bf16(torch, carrier):
    bits = torch.tensor([0x3F80], dtype=getattr(torch, carrier))
    assert to_torch(bits, dtype="bfloat16").tolist() == [1.0]
    assert to_torch(bits, dtype="bfloat16").data_ptr() == bits.data_ptr()
    assert to_numpy(bits, dtype="bfloat16").astype(np.float32).tolist() == [1.0]


@pytest.mark.parametrize("bridge", [to_torch, to_numpy])
def test_dtype_never_converts_values(torch, bridge):
    for source in (np.ones(2, np.float32), torch.ones(2)):
        with pytest.raises(TypeError, match=r"float32 \(4 bytes\).*bfloat16 \(2 bytes\)"):
            bridge(source, dtype="bfloat16")
        assert bridge(source, dtype="int32").tolist() == [0x3F800000] * 2


@pytest.mark.parametrize("dtype", ["float8_nothing", "float12", "object", ">f4"])
def test_unknown_dtype_is_refused(torch, dtype):
    with pytest.raises(TypeError, match=r"float8_nothing|float12|object|>f4"):
        to_torch(np.ones(2, np.uint8), dtype=dtype)


# ---------------------------------------------------------------- what a tensor may carry along


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameter_is_exported_detached(torch, dtype):
    weight = torch.nn.Parameter(torch.ones(3, dtype=getattr(torch, dtype)))
    assert to_numpy(weight).ctypes.data == weight.data_ptr()
    assert to_numpy(weight, copy=True).ctypes.data != weight.data_ptr()
    with torch.no_grad():
        assert to_numpy(weight).ctypes.data == weight.data_ptr()
    assert weight.requires_grad
    assert not to_torch(weight, dtype="int32" if dtype == "float32" else "int16").requires_grad


def test_pending_negation_is_resolved(torch):
    source = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert source.is_neg()
    assert to_numpy(source).tolist() == to_numpy(source, copy=True).tolist() == [-2, 4]
    assert to_torch(source, dtype="int32").view(torch.float32).tolist() == [-2, 4]
    with pytest.raises(BufferError, match=r"negation.*copy=None"):
        to_numpy(source, copy=False)


def test_pending_conjugation_is_resolved(torch):
    source = torch.tensor([1 + 2j]).conj()
    assert source.is_conj()
    assert to_numpy(source).tolist() == to_numpy(source, copy=True).tolist() == [1 - 2j]
    with pytest.raises(BufferError, match=r"conjugation.*copy=None"):
        to_numpy(source, copy=False)


# ---------------------------------------------------------------- what a NumPy array may carry along


@pytest.mark.parametrize("copy", [None, False])
def test_read_only_is_refused(torch, copy):
    source = np.ones(3, np.float32)
    source.flags.writeable = False
    with pytest.raises(BufferError, match=r"read-only.*copy=True"):
        to_torch(source, copy=copy)
    assert to_numpy(source, copy=copy) is source


def test_read_only_is_refused_by_to_cupy(cupy):
    source = np.broadcast_to(np.float32(1), 3)
    with pytest.raises(BufferError, match=r"read-only.*copy=True"):
        to_cupy(source)


def test_read_only_is_copied_on_request(torch):
    source = np.ones(3, np.float32)
    source.flags.writeable = False
    to_torch(source, copy=True)[0] = 5
    assert source.tolist() == [1, 1, 1]


def test_negative_and_odd_strides_are_copied_for_torch(torch):
    packed = np.zeros(3, [("flag", "u1"), ("value", "f4")])
    packed["value"] = [1, 2, 3]
    for source in (np.array([3, 2, 1], np.float32)[::-1], packed["value"]):
        assert to_torch(source).tolist() == to_torch(source, copy=True).tolist() == [1, 2, 3]
        with pytest.raises(ValueError, match=r"strides.*copy=None"):
            to_torch(source, copy=False)


def refused(torch):
    yield "list", [1.0, 2.0]
    yield "scalar", np.float32(1)
    yield "masked", np.ma.masked_array([1.0, 2.0], [True, False])
    yield "byte-swapped", np.ones(3, np.dtype(np.float32).newbyteorder())
    yield "sparse", torch.eye(3).to_sparse()
    yield "meta", torch.ones(3, device="meta")


@pytest.mark.parametrize("bridge", [to_torch, to_numpy, to_cupy])
def test_other_inputs_are_refused(torch, cupy, bridge):
    for name, array in refused(torch):
        with pytest.raises(TypeError, match=r"expected a NumPy array.*CuPy.*torch.*__dlpack__.*got"):
            pytest.fail(f"{name} was accepted: {bridge(array)}")


@pytest.mark.parametrize("array", [np.array([None]), np.array(["a"]), np.zeros(2, "M8[s]"), np.zeros(2, "V2")])
def test_dtypes_that_are_no_numbers_are_refused(torch, array):
    with pytest.raises(TypeError, match="cannot cross"):
        to_torch(array)


# ---------------------------------------------------------------- any other __dlpack__ object


@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize("producer", [Producer, OldProducer])
def test_foreign_array_shares_memory(torch, producer, copy):
    memory = np.zeros(3, np.float32)
    tensor, array = to_torch(producer(memory), copy=copy), to_numpy(producer(memory), copy=copy)
    assert tensor.data_ptr() == array.ctypes.data == memory.ctypes.data
    memory[0] = 9
    assert tensor.tolist() == array.tolist() == [9, 0, 0]


@pytest.mark.parametrize("bridge", [to_torch, to_numpy])
def test_foreign_array_on_the_cpu_gets_no_stream_and_the_copy_rule(torch, bridge):
    producer = Producer(np.zeros(3, np.float32))
    bridge(producer)
    bridge(producer, copy=False)
    assert [asked.get("stream") for asked in producer.asked] == [None, None]
    assert [asked.get("copy") for asked in producer.asked] == [None, False]


def test_foreign_array_takes_dtype(torch):
    assert to_torch(Producer(np.array([0x3F80], np.uint16)), dtype="bfloat16").tolist() == [1.0]
    assert to_numpy(Producer(np.array([0x3C00], np.uint16)), dtype="float16").tolist() == [1.0]


def test_foreign_bf16_reaches_numpy_only_by_its_array_method(torch, ml_dtypes):
    tensor = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"export its bits.*dtype="):
        to_numpy(Producer(tensor))

    class Convertible(Producer):
        def __array__(self, dtype=None, copy=None):
            return to_numpy(self.array)

    for copy in (None, False):
        array = to_numpy(Convertible(tensor), copy=copy)
        assert array.dtype == ml_dtypes.bfloat16
        assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("vendor", [2, 10])
def test_gpu_memory_needs_a_torch_with_that_gpu(torch, monkeypatch, vendor):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    producer = Producer(np.zeros(3, np.float32), device=(vendor, 0))
    with pytest.raises(RuntimeError, match=r"no GPU.*to_numpy"):
        to_torch(producer)
    assert producer.asked == []


@pytest.mark.parametrize(("vendor", "current", "passed"), [(2, 0, 1), (2, 7640, 7640), (10, 0, 0), (10, 7640, 7640)])
def test_foreign_gpu_array_gets_the_consumers_stream_on_its_own_device(torch, monkeypatch, vendor, current, passed):
    events = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            events.append(("enter", self.index))

        def __exit__(self, *error):
            events.append(("exit", self.index))

    class Ordered(Producer):
        def __dlpack__(self, **options):
            events.append(("stream", options["stream"]))
            return super().__dlpack__(**options)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=current))
    to_torch(Ordered(np.zeros(3, np.float32), device=(vendor, 1)))
    assert events == [("enter", 1), ("stream", passed), ("exit", 1)]


@pytest.mark.parametrize("vendor", [2, 10])
def test_transfers_are_refused_without_copy(cupy, vendor):
    with pytest.raises(ValueError, match=r"GPU memory has to be copied to the CPU.*copy=None"):
        to_numpy(Producer(np.zeros(3, np.float32), device=(vendor, 0)), copy=False)
    with pytest.raises(ValueError, match=r"CPU memory has to be copied to the GPU.*copy=None"):
        to_cupy(np.zeros(3, np.float32), copy=False)


def test_jax(torch, ml_dtypes):
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        source = jnp.array([1.0, 2.0], dtype)
        array, tensor = to_numpy(source), to_torch(source)
        assert array.dtype == source.dtype
        assert tensor.dtype == getattr(torch, dtype)
        assert array.astype(np.float32).tolist() == tensor.float().tolist() == [1.0, 2.0]
        assert array.ctypes.data == tensor.data_ptr() == source.unsafe_buffer_pointer()
        assert to_numpy(source, copy=False).ctypes.data == source.unsafe_buffer_pointer()
        fresh = to_torch(source, copy=True)
        fresh[:] = 0
        assert source.tolist() == [1.0, 2.0]


# ---------------------------------------------------------------- GPU

NUMBERS = ["float16", "float32", "float64", "int32", "uint8", "bool", "bfloat16", *FLOAT8]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMBERS)
def test_gpu_torch_and_cupy_share_memory(torch, cupy, ml_dtypes, dtype):
    source = torch.ones(2, 3, device="cuda").to(getattr(torch, dtype))
    array = to_cupy(source)
    assert array.dtype == {"bfloat16": ml_dtypes.bfloat16}.get(dtype, "uint8" if dtype in FLOAT8 else dtype)
    assert array.data.ptr == source.data_ptr()
    back = to_torch(array, dtype=dtype)
    assert back.dtype == source.dtype
    assert back.device == source.device
    assert back.data_ptr() == source.data_ptr()
    array.view(cupy.uint8)[...] = 0
    torch.cuda.synchronize()
    assert not back.float().any()


@pytest.mark.gpu
def test_gpu_bf16_without_ml_dtypes_is_carried_as_bits(torch, cupy, monkeypatch):
    source = torch.tensor([1.0, -2.5], dtype=torch.bfloat16, device="cuda")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    bits = to_cupy(source)
    assert bits.dtype == np.uint16
    assert bits.data.ptr == source.data_ptr()
    assert to_torch(bits, dtype="bfloat16").tolist() == [1.0, -2.5]


@pytest.mark.gpu
def test_gpu_fp8_is_no_cupy_dtype(torch, cupy):
    source = torch.ones(3, device="cuda").to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"cupy has no float8_e4m3fn.*uint8"):
        to_cupy(source, dtype="float8_e4m3fn")


@pytest.mark.gpu
def test_gpu_transfers_are_explicit(torch, cupy):
    for source in (torch.tensor([1.0, 2.0], device="cuda"), cupy.asarray([1.0, 2.0], "f4")):
        assert to_numpy(source).tolist() == to_numpy(source, copy=True).tolist() == [1.0, 2.0]
        with pytest.raises(ValueError, match="GPU memory has to be copied"):
            to_numpy(source, copy=False)
    for source in (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0], "f4"), Producer(np.array([1.0, 2.0], "f4"))):
        assert to_cupy(source).get().tolist() == to_cupy(source, copy=True).get().tolist() == [1.0, 2.0]
    host = to_numpy(torch.tensor([1.0, -2.5], dtype=torch.bfloat16, device="cuda"))
    assert host.astype(np.float32).tolist() == [1.0, -2.5]
    assert to_numpy(to_cupy(host)).astype(np.float32).tolist() == [1.0, -2.5]


@pytest.mark.gpu
def test_gpu_gradient_and_pending_negation(torch, cupy):
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    assert to_cupy(weight).data.ptr == weight.data_ptr()
    negated = torch.tensor([1 + 2j], device="cuda").conj().imag
    assert to_cupy(negated).get().tolist() == [-2]
    with pytest.raises(BufferError, match="negation"):
        to_cupy(negated, copy=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_zero_size(torch, cupy, dtype):
    array = to_cupy(torch.empty(0, 5, dtype=getattr(torch, dtype), device="cuda"))
    assert array.shape == (0, 5)
    tensor = to_torch(array)
    assert tensor.shape == (0, 5)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.device.type == "cuda"


@pytest.mark.gpu
def test_gpu_copies_are_fresh_and_negative_strides_are_copied(torch, cupy):
    source = cupy.arange(3, dtype="f4")
    fresh = [to_cupy(source, copy=True), to_torch(source, copy=True), to_torch(source[::-1])]
    with pytest.raises(ValueError, match="strides"):
        to_torch(source[::-1], copy=False)
    source[...] = 9
    assert [each.tolist() for each in fresh] == [[0, 1, 2], [0, 1, 2], [2, 1, 0]]


@pytest.mark.gpu
def test_gpu_owners_are_kept_alive(torch, cupy):
    tensor = to_torch(cupy.full(1 << 20, 3, "f4"))
    array = to_cupy(torch.full((1 << 20,), 3.0, device="cuda"))
    gc.collect()
    others = [(cupy.zeros(1 << 20, "f4"), torch.zeros(1 << 20, device="cuda")) for _ in range(4)]
    torch.cuda.synchronize()
    assert len(others) == 4
    assert tensor.eq(3).all()
    assert (array == 3).all()


@pytest.mark.gpu
def test_gpu_stream_numbers_of_both_vendors(torch, cupy):
    hip = torch.version.hip is not None
    source = cupy.zeros(3, "f4")
    assert source.__dlpack_device__()[0] == torch.zeros(1, device="cuda").__dlpack_device__()[0] == (10 if hip else 2)
    theirs, ours = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    producer = Producer(source)
    to_torch(producer)
    to_cupy(producer)
    with torch.cuda.stream(theirs), ours:
        to_torch(producer)
        to_cupy(producer)
    default = 0 if hip else 1
    assert [asked["stream"] for asked in producer.asked] == [default, default, theirs.cuda_stream, ours.ptr]


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_gpu_consumer_waits_for_a_slow_producer(torch, cupy, side):
    tensor, array = torch.zeros(1 << 20, device="cuda"), cupy.zeros(1 << 20, "f4")
    producer = cupy.cuda.Stream(non_blocking=True)
    external = torch.cuda.ExternalStream(producer.ptr)
    cupy_consumer = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
    torch_consumer = torch.cuda.Stream() if side else torch.cuda.default_stream()
    for sleep in (1, 200_000_000):  # the first round compiles and loads the kernels, which would hide a race
        tensor.zero_()
        array.fill(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(external), cupy_consumer:
            torch.cuda._sleep(sleep)
            tensor.fill_(1)
            assert float(to_cupy(tensor).sum()) == 1 << 20
        with torch.cuda.stream(external):
            torch.cuda._sleep(sleep)
        with torch.cuda.stream(torch_consumer), producer:
            array.fill(1)
            assert float(to_torch(array).sum()) == 1 << 20


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_gpu_that_is_not_current(torch, cupy):
    with cupy.cuda.Device(1):
        array = cupy.arange(3, dtype="f4")
    tensor = torch.arange(3.0, device="cuda:1")
    assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
    for copy in (None, True):
        there, back = to_torch(array, copy=copy), to_cupy(tensor, copy=copy)
        assert there.device == tensor.device
        assert back.device.id == to_cupy(array, copy=copy).device.id == 1
        assert there.tolist() == back.get().tolist() == [0, 1, 2]
    assert to_numpy(array).tolist() == to_numpy(tensor).tolist() == [0, 1, 2]
    assert to_torch(array).data_ptr() == array.data.ptr
    assert to_cupy(tensor).data.ptr == tensor.data_ptr()
    assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
