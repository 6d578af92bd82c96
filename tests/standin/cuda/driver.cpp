// The driver: what Triton and torch call of libcuda.so.1. Triton's kernels come here.
#include "device.hpp"

#include <cstring>
#include <dlfcn.h>

using namespace standin;

static int context;
static CUresult missing() { return CUDA_ERROR_NOT_SUPPORTED; }

void* standin::driver_function(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  return found ? found : (void*)missing;
}

static CUresult launch_kernel(CUfunction function, const Launch& how, CUstream stream) {
  Launch named = how;
  named.kernel = ((std::string*)function)->c_str();
  return launch(stream, named) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#undef cuDeviceGet
#undef cuGetProcAddress
extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "refused by the stand-in", CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { return *text = "an error of the stand-in", CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* found, int number) { return *found = number, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice) {
  return *value = attribute(number), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* found) { return *found = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* found) { return *found = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice) { return *found = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  return *flags = 0, *is_active = 1, CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* found, const void*) {
  Lock lock(device().mutex);
  device().num_modules++;
  if (capture_of_this_thread()) violation("a module was loaded during a capture");
  return *found = (CUmodule)&context, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* found, CUmodule, const char* name) {
  return *found = (CUfunction) new std::string(name), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction) {
  *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  return *count = 4, CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void**, void**) {
  bool overlaps = false;  // starts before the kernel in front of it has ended
  for (unsigned i = 0; i < how->numAttrs; i++)
    overlaps |= how->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  Launch one = {"", {how->gridDimX, how->gridDimY, how->gridDimZ}, {how->blockDimX, how->blockDimY, how->blockDimZ},
                overlaps ? " overlaps" : ""};
  return launch_kernel(function, one, how->hStream);
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned, CUstream stream, void**, void**) {
  return launch_kernel(function, {"", {x, y, z}, {block_x, block_y, block_z}, ""}, stream);
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute number, CUdeviceptr address) {
  if (place_of((void*)address) == Place::pageable) {
    violation("a kernel got the address of pageable memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = address;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
  *function = !strcmp(name, "cuGetProcAddress") ? (void*)cuGetProcAddress_v2 : driver_function(name);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
}
