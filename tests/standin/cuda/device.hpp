// A CUDA device that computes nothing. This file says what all parts share: memory, captures, graphs, violations.
//
// Device memory is a reserved range of addresses that nobody may touch, so host code that reads device memory crashes.
// Copies to the host write zeros. Other copies, fills, kernels and products of matrices do nothing: what counts is when
// they come, and on which stream. Whatever a real device would refuse during a capture, or what would make a graph
// wrong, is a violation.
//
// Out of scope: values, time, several devices, streams that join a capture by events, pools of cudaMallocAsync, memory
// shared between processes.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <pthread.h>
#include <string>
#include <vector>

namespace standin {

struct Graph {
  std::vector<std::string> nodes;
};

struct Capture {
  Graph* graph;
  unsigned long long id;
  cudaStreamCaptureMode mode;
  pthread_t thread;
};

struct Launch {
  std::string kernel;
  unsigned grid[3];
  unsigned block[3];
  std::string note;
};

enum class Place { device, pinned, pageable };

struct Device {
  std::recursive_mutex mutex;
  std::map<const char*, size_t> device_ranges, pinned_ranges;
  size_t used_bytes = 0;
  std::map<cudaStream_t, Capture> captures;
  unsigned long long num_captures = 0;
  std::vector<Graph*> graphs;  // never freed: they are what is reported
  std::vector<std::string> violations;
  unsigned long long num_replays = 0, num_mallocs = 0, num_modules = 0;
};

Device& device();
using Lock = std::lock_guard<std::recursive_mutex>;

struct Model {  // what programs ask about a GPU
  int major, minor, multiprocessors, max_shared_bytes;
};
const Model& model();
int attribute(int number);  // the runtime and the driver number them alike
constexpr size_t TOTAL_BYTES = 139ull << 30;

void violation(const std::string& what);
Capture* capture_of(cudaStream_t stream);
Capture* capture_of_this_thread();

// Whether CUDA's rules forbid calls such as cudaMalloc now, in view of the modes of captures and of this thread.
bool is_unsafe_now();
cudaStreamCaptureMode& mode_of_this_thread();

Place place_of(const void* address, size_t num_bytes = 1);
void check_bounds(const void* address, size_t num_bytes, const char* what);

// All work that is put on a stream passes here: a node if the stream is captured, else nothing.
void work(cudaStream_t stream, const std::string& name);
bool launch(cudaStream_t stream, const Launch& launch);  // false if no GPU accepts the grid

void* driver_function(const char* name);  // one that fails if the stand-in lacks it

}  // namespace standin
