// The part of the runtime that registers and launches torch's own kernels, and says what the device is.
#include "device.hpp"

#include <cstdio>
#include <unordered_map>

using namespace standin;

static std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>();  // libraries register before main
  return *names;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;

static cudaError_t launch_function(const void* function, dim3 grid, dim3 block, cudaStream_t stream) {
  auto found = kernel_names().find(function);
  std::string name = found == kernel_names().end() ? "unknown" : found->second;
  bool is_possible = launch(stream, {name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, ""});
  return is_possible ? cudaSuccess : cudaErrorInvalidConfiguration;
}

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernel_names()[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared_bytes = last.shared_bytes, *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_function(kernel, grid, block, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_function(function, grid, block, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void**) {
  return launch_function(function, how->gridDim, how->blockDim, how->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  work(stream, "host function");
  if (!capture_of(stream)) function(data);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* number) { return *number = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) {
  return *value = attribute(number), cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  return snprintf(text, size, "0000:01:00.0"), cudaSuccess;
}
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  *found = {};
  snprintf(found->name, sizeof found->name, "stand-in of compute capability %d.%d", model().major, model().minor);
  found->totalGlobalMem = TOTAL_BYTES;
  found->major = model().major;
  found->minor = model().minor;
  found->multiProcessorCount = model().multiprocessors;
  found->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  found->sharedMemPerBlockOptin = model().max_shared_bytes;
  found->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->regsPerMultiprocessor = found->regsPerBlock = 65536;
  found->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  found->unifiedAddressing = 1;
  for (int axis = 0; axis < 3; axis++) {
    found->maxGridSize[axis] = axis ? 65535 : 2147483647;
    found->maxThreadsDim[axis] = axis == 2 ? 64 : 1024;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 10 * model().major + model().minor;
  found->maxDynamicSharedSizeBytes = model().max_shared_bytes;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }  // every error is returned by the call that causes it
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in"; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorStreamCaptureUnsupported ? "the stand-in refused this during a capture"
                                                    : "refused by the stand-in";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = driver_function(name);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
