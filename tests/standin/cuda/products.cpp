// What torch's matrix products call of cuBLAS and cuBLASLt. Any other function would reach the real library, which does
// not know the handles made here: a product that crashes there needs its function here. cuBLAS's headers need a package
// that torch does not bring, so arguments that do not matter are not declared.
#include "device.hpp"

using namespace standin;

struct Handle {
  cudaStream_t stream;
};

static int created(void** description) { return *description = new char[64](), 0; }
static int destroyed(void* description) { return delete[] (char*)description, 0; }

extern "C" {
int cublasCreate_v2(Handle** handle) { return *handle = new Handle(), 0; }
int cublasDestroy_v2(Handle*) { return 0; }
int cublasSetStream_v2(Handle* handle, cudaStream_t stream) { return handle->stream = stream, 0; }
int cublasGetStream_v2(Handle* handle, cudaStream_t* stream) { return *stream = handle->stream, 0; }
int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
int cublasSetMathMode(Handle*, int) { return 0; }
int cublasGetMathMode(Handle*, int* mode) { return *mode = 0; }
int cublasSetPointerMode_v2(Handle*, int) { return 0; }
int cublasGetPointerMode_v2(Handle*, int* mode) { return *mode = 0; }

#define PRODUCT(name) \
  int name(Handle* handle, ...) { return work(handle->stream, #name), 0; }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)

size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** made, ...) { return created(made); }
int cublasLtMatmulDescDestroy(void* made) { return destroyed(made); }
int cublasLtMatmulDescSetAttribute(void*, ...) { return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { return created(made); }
int cublasLtMatmulPreferenceDestroy(void* made) { return destroyed(made); }
int cublasLtMatmulPreferenceSetAttribute(void*, ...) { return 0; }
int cublasLtMatrixLayoutCreate(void** made, ...) { return created(made); }
int cublasLtMatrixLayoutDestroy(void* made) { return destroyed(made); }
int cublasLtMatrixLayoutSetAttribute(void*, ...) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* num_found) {
  return *num_found = 1, 0;  // torch clears the result before it asks
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return work(stream, "cublasLtMatmul"), 0;
}
}
