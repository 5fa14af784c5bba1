// A stand-in for libamdhip64.so.7: what CuPy and this package ask of the HIP runtime, on the host's memory.
//
// Knows:    the C signatures and structures of HIP 7 (hip_runtime_api.h), and that a "code object" is a program's text.
// Must not: run kernels: hipModuleLaunchKernel hands everything to the function that stand_in_set_launcher was given.
//
// Two devices. Streams and events are only names: every call has ended when it returns. Each call that says something
// about the package is a line of the record, words separated by tabs.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

typedef int hipError_t;
enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorInvalidImage = 200,
    hipErrorFileNotFound = 301,
    hipErrorNotFound = 500,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801
};

constexpr int DEVICES = 2, VERSION = 70051831;

static std::mutex lock;
static std::string record;
static thread_local int current_device;
static thread_local hipError_t last_error;  // sticky, as in ROCm 7: until somebody asks

static hipError_t failed(hipError_t error) { return last_error = error; }

template <class... Words>
static void note(const Words&... words) {
    std::ostringstream line;
    const char* separator = "";
    ((line << separator << words, separator = "\t"), ...);
    std::lock_guard<std::mutex> hold(lock);
    record += line.str() + "\n";
}

// ------------------------------------------------------------------------------------------------ the test's side

struct Launch {
    const char *text, *kernel;
    unsigned grid, block;
    int device;
    void *stream, **arguments;
};
typedef int (*Launcher)(const Launch*);
static Launcher launcher;

extern "C" {
void stand_in_set_launcher(Launcher function) { launcher = function; }
void stand_in_note(const char* line) { note(line); }
const char* stand_in_record() { return record.c_str(); }
void stand_in_forget() { record.clear(); }
hipError_t stand_in_refuse(const char* name) {  // of all functions that are not written here
    note("refused", name);
    return failed(hipErrorNotSupported);
}
}

// ------------------------------------------------------------------------------------------------ memory

struct Area {
    size_t size;
    int device;
};
static std::map<char*, Area> areas;

extern "C" {
// The allocations, for the launcher: addresses and sizes, at most `room` of them.
int stand_in_areas(int64_t* pairs, int room) {
    std::lock_guard<std::mutex> hold(lock);
    int count = 0;
    for (const auto& [start, area] : areas) {
        if (count == room) break;
        pairs[2 * count] = reinterpret_cast<int64_t>(start);
        pairs[2 * count++ + 1] = int64_t(area.size);
    }
    return count;
}

hipError_t hipMalloc(void** pointer, size_t size) {
    char* start = static_cast<char*>(aligned_alloc(256, (size + 255) / 256 * 256 + 256));
    for (size_t i = 0; i + 1 < size; i += 2) memcpy(start + i, "\xa0\x7f", 2);  // signalling NaNs, as lanes.poisoned
    std::lock_guard<std::mutex> hold(lock);
    areas[start] = {size, current_device};
    *pointer = start;
    return hipSuccess;
}
hipError_t hipFree(void* pointer) {
    std::lock_guard<std::mutex> hold(lock);
    if (pointer && !areas.erase(static_cast<char*>(pointer))) return failed(hipErrorInvalidValue);
    free(pointer);
    return hipSuccess;
}
hipError_t hipHostMalloc(void** pointer, size_t size, unsigned) {
    *pointer = aligned_alloc(256, (size + 255) / 256 * 256 + 256);
    return hipSuccess;
}
hipError_t hipHostFree(void* pointer) {
    free(pointer);
    return hipSuccess;
}
hipError_t hipMemGetInfo(size_t* unused, size_t* total) {
    *unused = *total = size_t(192) << 30;
    return hipSuccess;
}
hipError_t hipMemcpy(void* to, const void* from, size_t size, int) {
    memmove(to, from, size);
    return hipSuccess;
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t size, int kind, void*) {
    return hipMemcpy(to, from, size, kind);
}
hipError_t hipMemset(void* to, int value, size_t size) {
    memset(to, value, size);
    return hipSuccess;
}
hipError_t hipMemsetAsync(void* to, int value, size_t size, void*) { return hipMemset(to, value, size); }

struct hipPointerAttribute_t {
    int type, device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
};
hipError_t hipPointerGetAttributes(hipPointerAttribute_t* to, const void* pointer) {
    *to = {0 /* hipMemoryTypeUnregistered, no error since HIP 6 */, -2, nullptr, nullptr, 0, 0};
    std::lock_guard<std::mutex> hold(lock);
    auto after = areas.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == areas.begin()) return hipSuccess;
    const auto& [start, area] = *--after;
    if (static_cast<const char*>(pointer) < start + area.size)
        *to = {2 /* hipMemoryTypeDevice */, area.device, const_cast<void*>(pointer), nullptr, 0, 0};
    return hipSuccess;
}
}

// ------------------------------------------------------------------------------------------------ devices

// hipDeviceProp_tR0600 up to what is asked of it; the fields in between only have their sizes.
struct Properties {
    char name[256];
    char uuid[16], luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory, computeMode;
    int textures_and_surfaces[40];
    size_t surfaceAlignment;
    int concurrentKernels_to_localL1CacheSupported[16];
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor_to_cooperativeMultiDeviceLaunch[12];
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccess_to_accessPolicyMaxWindowSize[4];
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported_to_unifiedFunctionPointers[13];
    int reserved[63], hipReserved[32];
    char gcnArchName[256];
    size_t maxSharedMemoryPerMultiProcessor;
    int clockInstructionRate;
    unsigned arch;
    unsigned *hdpMemFlushCntl, *hdpRegFlushCntl;
    int cooperativeMultiDeviceUnmatched[4], isLargeBar, asicRevision;
};
static_assert(sizeof(Properties) == 1472, "sizeof(hipDeviceProp_tR0600)");

extern "C" {
hipError_t hipGetDevicePropertiesR0600(Properties* to, int device) {
    if (device < 0 || device >= DEVICES) return failed(101);  // hipErrorInvalidDevice
    *to = {};
    strcpy(to->name, "a stand-in for AMD Instinct MI300X");
    strcpy(to->gcnArchName, "gfx942:sramecc+:xnack-");
    to->totalGlobalMem = size_t(192) << 30;
    to->sharedMemPerBlock = to->sharedMemPerMultiprocessor = to->maxSharedMemoryPerMultiProcessor = 65536;
    to->regsPerBlock = 65536;
    to->warpSize = 64;
    to->maxThreadsPerBlock = 1024;
    for (int& size : to->maxThreadsDim) size = 1024;
    for (int& size : to->maxGridSize) size = 2147483647;
    to->major = 9;
    to->minor = 4;
    to->multiProcessorCount = 304;
    return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* to, int attribute, int) {
    *to = attribute == 23 ? 9 : attribute == 61 ? 4 : attribute == 87 ? 64 : 0;  // compute capability, warpSize
    return hipSuccess;
}
hipError_t hipGetDeviceCount(int* to) {
    *to = DEVICES;
    return hipSuccess;
}
hipError_t hipGetDevice(int* to) {
    *to = current_device;
    return hipSuccess;
}
hipError_t hipSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return failed(101);
    current_device = device;
    return hipSuccess;
}
hipError_t hipDeviceSynchronize() { return hipSuccess; }
hipError_t hipDeviceCanAccessPeer(int* to, int, int) {
    *to = 0;
    return hipSuccess;
}
hipError_t hipRuntimeGetVersion(int* to) {
    *to = VERSION;
    return hipSuccess;
}
hipError_t hipDriverGetVersion(int* to) { return hipRuntimeGetVersion(to); }
hipError_t hipGetLastError() {
    const hipError_t error = last_error;
    last_error = hipSuccess;
    return error;
}
hipError_t hipPeekAtLastError() { return last_error; }
const char* hipGetErrorName(hipError_t error) { return error ? "hipErrorOfTheStandIn" : "hipSuccess"; }
const char* hipGetErrorString(hipError_t error) { return error ? "refused by the stand-in for ROCm" : "no error"; }
}

// ------------------------------------------------------------------------------------------------ streams, events

static intptr_t next_name = 0x1000;

static hipError_t named(void** to) {
    std::lock_guard<std::mutex> hold(lock);
    *to = reinterpret_cast<void*>(next_name += 0x10);
    return hipSuccess;
}

extern "C" {
hipError_t hipStreamCreate(void** stream) { return named(stream); }
hipError_t hipStreamCreateWithFlags(void** stream, unsigned) { return named(stream); }
hipError_t hipStreamCreateWithPriority(void** stream, unsigned, int) { return named(stream); }
hipError_t hipStreamDestroy(void*) { return hipSuccess; }
hipError_t hipStreamSynchronize(void*) { return hipSuccess; }
hipError_t hipStreamQuery(void*) { return hipSuccess; }
hipError_t hipGetStreamDeviceId(void*) { return current_device; }
hipError_t hipStreamIsCapturing(void*, int* to) {
    *to = 0;
    return hipSuccess;
}
hipError_t hipStreamWaitEvent(void* stream, void* event, unsigned) {
    note("hipStreamWaitEvent", stream ? stream : "0", event);
    return hipSuccess;
}
hipError_t hipEventCreate(void** event) { return named(event); }
hipError_t hipEventCreateWithFlags(void** event, unsigned) { return named(event); }
hipError_t hipEventDestroy(void*) { return hipSuccess; }
hipError_t hipEventQuery(void*) { return hipSuccess; }
hipError_t hipEventSynchronize(void*) { return hipSuccess; }
hipError_t hipEventRecord(void* event, void* stream) {
    note("hipEventRecord", event, stream ? stream : "0");
    return hipSuccess;
}
}

// ------------------------------------------------------------------------------------------------ modules

struct Module {
    std::string text;
};
struct Function {
    const Module* module;
    std::string name;
};

static hipError_t loaded(void** module, std::string text) {
    if (text.compare(0, 14, "#line 1 \"const")) return failed(hipErrorInvalidImage);  // how every program begins
    *module = new Module{text};
    return hipSuccess;
}

extern "C" {
hipError_t hipModuleLoad(void** module, const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return failed(hipErrorFileNotFound);
    std::ostringstream content;
    content << file.rdbuf();
    note("hipModuleLoad", path, current_device);
    return loaded(module, content.str());
}
hipError_t hipModuleLoadData(void** module, const void* image) {
    note("hipModuleLoadData", current_device);
    return loaded(module, static_cast<const char*>(image));
}
hipError_t hipModuleUnload(void*) { return hipSuccess; }
hipError_t hipModuleGetFunction(void** function, void* module, const char* name) {
    const Module* in = static_cast<Module*>(module);
    if (in->text.find("ENTRY(" + std::string(name) + ")") == std::string::npos) return failed(hipErrorNotFound);
    *function = new Function{in, name};
    return hipSuccess;
}
hipError_t hipModuleLaunchKernel(void* function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
                                 unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
                                 void** extra) {
    const Function* of = static_cast<Function*>(function);
    if (grid_y * grid_z * block_y * block_z != 1 || shared || extra || !grid || uint64_t(grid) * block >> 32)
        return failed(hipErrorInvalidValue);
    if (!launcher) return failed(hipErrorLaunchFailure);
    const Launch launch{of->module->text.c_str(), of->name.c_str(), grid, block, current_device, stream, arguments};
    return launcher(&launch) ? failed(hipErrorLaunchFailure) : hipSuccess;
}
}
