// The part of the runtime that orders work: streams, events, captures, graphs.
#include "device.hpp"

#include <chrono>
#include <utility>

using namespace standin;
using Clock = std::chrono::steady_clock;

static cudaError_t refused_if(bool is_refused, const char* what) {
  if (!is_refused) return cudaSuccess;
  violation(std::string(what) + " during a capture");
  return cudaErrorStreamCaptureUnsupported;
}

// Waiting is what a capture cannot do; other streams may be waited for, but a pass that is captured has no reason to.
static cudaError_t wait(const char* what) { return refused_if(capture_of_this_thread(), what); }

extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = (cudaStream_t) new char;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Lock lock(device().mutex);
  return refused_if(!device().captures.empty(), "cudaDeviceSynchronize");
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait("cudaStreamSynchronize"); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return refused_if(capture_of(stream), "cudaStreamQuery"); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Clock::time_point();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Clock::time_point*)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *(Clock::time_point*)event = Clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t) { return refused_if(is_unsafe_now(), "cudaEventQuery"); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("cudaEventSynchronize"); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(*(Clock::time_point*)end - *(Clock::time_point*)start).count();
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_this_thread());
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(device().mutex);
  if (!stream || capture_of(stream)) return refused_if(true, "the capture of the default or of a captured stream");
  device().captures[stream] = {new Graph(), ++device().num_captures, mode, pthread_self()};
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(device().mutex);
  Capture* capture = capture_of(stream);
  *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (!capture) return cudaErrorIllegalState;
  device().graphs.push_back(capture->graph);
  device().captures.erase(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(device().mutex);
  *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* num_dependencies) {
  Lock lock(device().mutex);
  Capture* capture = capture_of(stream);
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (capture && id) *id = capture->id;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (num_dependencies) *num_dependencies = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = ((Graph*)graph)->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  Lock lock(device().mutex);
  device().num_replays++;
  return refused_if(capture_of_this_thread(), "the launch of a graph");
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
}
