// The state of the device, the rules of captures, and what Python asks after a run.
#include "device.hpp"

#include <cstdio>
#include <cstdlib>

namespace standin {

Device& device() {
  static Device* one = new Device();  // torch still frees memory when static objects are gone
  return *one;
}

const Model& model() {
  // The values that NVIDIA's programming guide gives for each compute capability; processors are those of one product.
  static const Model models[] = {
      {8, 0, 108, 166912}, {8, 9, 142, 101376}, {9, 0, 132, 232448}, {10, 0, 148, 232448}, {12, 0, 188, 101376},
  };
  static const Model* chosen = [] {
    const char* text = getenv("STANDIN_CAPABILITY");
    int major = 9, minor = 0;
    if (text) sscanf(text, "%d.%d", &major, &minor);
    for (const Model& one : models)
      if (one.major == major && one.minor == minor) return &one;
    fprintf(stderr, "stand-in: no GPU of compute capability %s is known\n", text);
    exit(2);
  }();
  return *chosen;
}

int attribute(int number) {
  switch (number) {
    case cudaDevAttrComputeCapabilityMajor: return model().major;
    case cudaDevAttrComputeCapabilityMinor: return model().minor;
    case cudaDevAttrMultiProcessorCount: return model().multiprocessors;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return model().max_shared_bytes;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return model().max_shared_bytes + 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrUnifiedAddressing: return 1;
    default: return 0;
  }
}

void violation(const std::string& what) {
  Lock lock(device().mutex);
  device().violations.push_back(what);
  fprintf(stderr, "VIOLATION: %s\n", what.c_str());
  if (getenv("STANDIN_ABORT")) abort();  // faulthandler then shows the lines of Python
}

Capture* capture_of(cudaStream_t stream) {
  auto found = device().captures.find(stream);
  return found == device().captures.end() ? nullptr : &found->second;
}

Capture* capture_of_this_thread() {
  for (auto& [stream, capture] : device().captures)
    if (pthread_equal(capture.thread, pthread_self())) return &capture;
  return nullptr;
}

cudaStreamCaptureMode& mode_of_this_thread() {
  static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

bool is_unsafe_now() {
  Lock lock(device().mutex);
  if (mode_of_this_thread() == cudaStreamCaptureModeRelaxed) return false;
  for (auto& [stream, capture] : device().captures) {
    if (capture.mode == cudaStreamCaptureModeRelaxed) continue;
    if (pthread_equal(capture.thread, pthread_self())) return true;
    bool is_global = capture.mode == cudaStreamCaptureModeGlobal;
    if (is_global && mode_of_this_thread() == cudaStreamCaptureModeGlobal) return true;
  }
  return false;
}

static bool holds(const std::map<const char*, size_t>& ranges, const char* address, size_t num_bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto range = std::prev(after);
  return address + num_bytes <= range->first + range->second;
}

Place place_of(const void* address, size_t num_bytes) {
  Lock lock(device().mutex);
  if (holds(device().device_ranges, (const char*)address, num_bytes)) return Place::device;
  return holds(device().pinned_ranges, (const char*)address, num_bytes) ? Place::pinned : Place::pageable;
}

void check_bounds(const void* address, size_t num_bytes, const char* what) {
  if (num_bytes && place_of(address) == Place::device && place_of(address, num_bytes) != Place::device)
    violation(std::string(what) + " beyond the end of device memory");
}

void work(cudaStream_t stream, const std::string& name) {
  Lock lock(device().mutex);
  if (Capture* capture = capture_of(stream))
    capture->graph->nodes.push_back(name);
  else if (capture_of_this_thread())
    violation("work on another stream than the captured one: " + name);
}

bool launch(cudaStream_t stream, const Launch& one) {
  const unsigned *grid = one.grid, *block = one.block;
  bool is_possible = grid[0] && grid[1] && grid[2] && grid[1] <= 65535 && grid[2] <= 65535 && grid[0] <= 2147483647;
  unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
  if (!is_possible || !threads || threads > 1024) violation("impossible grid or block: " + one.kernel);
  char numbers[96];
  snprintf(numbers, sizeof numbers, " grid %u,%u,%u block %llu", grid[0], grid[1], grid[2], threads);
  work(stream, "kernel " + one.kernel + numbers + one.note);
  return is_possible;
}

}  // namespace standin

using namespace standin;

extern "C" {
unsigned long long standin_replays() { return device().num_replays; }
unsigned long long standin_mallocs() { return device().num_mallocs; }
unsigned long long standin_modules() { return device().num_modules; }
int standin_num_violations() { return (int)device().violations.size(); }
const char* standin_violation(int index) { return device().violations.at(index).c_str(); }
int standin_num_graphs() { return (int)device().graphs.size(); }
int standin_num_nodes(int graph) { return (int)device().graphs.at(graph)->nodes.size(); }
const char* standin_node(int graph, int node) { return device().graphs.at(graph)->nodes.at(node).c_str(); }
void standin_work(void* stream, const char* name) { work((cudaStream_t)stream, name); }
}
