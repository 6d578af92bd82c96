// The part of the runtime that allocates, copies and fills.
#include "device.hpp"

#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

using namespace standin;

static constexpr size_t PAGE = 2 << 20;  // real addresses are multiples of it

static cudaError_t refused(const char* what) {
  violation(std::string(what) + " during a capture");
  return cudaErrorStreamCaptureUnsupported;
}

static const char* named(Place place) {
  return place == Place::device ? "device" : place == Place::pinned ? "pinned" : "pageable";
}

static cudaError_t copy(void* target, const void* source, size_t num_bytes, cudaStream_t stream) {
  Lock lock(device().mutex);
  check_bounds(target, num_bytes, "copy to");
  check_bounds(source, num_bytes, "copy from");
  Place to = place_of(target), from = place_of(source);
  work(stream, std::string("copy ") + named(from) + " to " + named(to) + " " + std::to_string(num_bytes));
  if (capture_of(stream)) {
    if (to == Place::pageable || from == Place::pageable) violation("copy of pageable memory during a capture");
  } else if (to != Place::device) {
    from == Place::device ? memset(target, 0, num_bytes) : memmove(target, source, num_bytes);
  }
  return cudaSuccess;
}

extern "C" {
cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  if (is_unsafe_now()) return refused("cudaMalloc");
  Lock lock(device().mutex);
  *address = nullptr;
  size_t size = (num_bytes + PAGE - 1) / PAGE * PAGE;
  if (device().used_bytes + size > TOTAL_BYTES) return cudaErrorMemoryAllocation;
  void* range = mmap(nullptr, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return cudaErrorMemoryAllocation;
  char* aligned = (char*)(((size_t)range + PAGE - 1) / PAGE * PAGE);
  device().device_ranges[aligned] = size;
  device().used_bytes += size;
  device().num_mallocs++;
  *address = aligned;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  if (is_unsafe_now()) return refused("cudaFree");
  Lock lock(device().mutex);
  auto range = device().device_ranges.find((const char*)address);
  if (range == device().device_ranges.end()) {
    violation("cudaFree of an address that was not allocated");
    return cudaErrorInvalidValue;
  }
  device().used_bytes -= range->second;
  munmap(address, range->second);
  device().device_ranges.erase(range);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
  if (is_unsafe_now()) return refused("cudaHostRegister");
  Lock lock(device().mutex);
  device().pinned_ranges[(const char*)address] = num_bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  Lock lock(device().mutex);
  device().pinned_ranges.erase((const char*)address);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned flags) {
  if (is_unsafe_now()) return refused("cudaHostAlloc");
  *address = aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  return cudaHostRegister(*address, num_bytes, flags);
}

cudaError_t cudaFreeHost(void* address) {
  cudaHostUnregister(address);
  free(address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = TOTAL_BYTES;
  *free_bytes = TOTAL_BYTES - device().used_bytes;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  *found = {};
  Place place = place_of(address);
  found->type = place == Place::device   ? cudaMemoryTypeDevice
                : place == Place::pinned ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
  found->devicePointer = place == Place::pageable ? nullptr : (void*)address;
  found->hostPointer = place == Place::pinned ? (void*)address : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t num_bytes, cudaMemcpyKind) {
  if (capture_of_this_thread()) return refused("cudaMemcpy, which waits,");
  return copy(target, source, num_bytes, nullptr);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t num_bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(target, source, num_bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t num_bytes, cudaStream_t stream) {
  return copy(target, source, num_bytes, stream);
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    copy((char*)target + row * target_pitch, (const char*)source + row * source_pitch, width, stream);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int, size_t num_bytes, cudaStream_t stream) {
  check_bounds(address, num_bytes, "fill");
  work(stream, "fill " + std::to_string(num_bytes));
  return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, size_t num_bytes) {
  if (capture_of_this_thread()) return refused("cudaMemset, which waits,");
  return cudaMemsetAsync(address, value, num_bytes, nullptr);
}
}
