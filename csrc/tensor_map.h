// CUTLASS writes a descriptor that the driver refuses to stderr and goes on; here the refusal is kept, to be returned.
//
// Every descriptor is made through CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled), which is taken over before any header of
// CuTe is read. In the emulated build the function called in the end is the one of emulated/emulated.cuh.
#pragma once
#include "cutlass/cutlass.h"
#include "cutlass/cuda_host_adapter.hpp"

namespace peft_nvfp4 {

// CUresult of the last descriptor that was refused, 0 if none was.
inline int& tensor_map_error() {
  static thread_local int error = 0;
  return error;
}

#ifdef PEFT_NVFP4_EMULATED
inline CUresult encode_bytes(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
#endif

template <class... Args>
CUresult encode_tensor_map(Args... args) {
#ifdef PEFT_NVFP4_EMULATED
  CUresult result = encode_bytes(args...);
#else
  CUresult result = cutlass::call_cuTensorMapEncodeTiled(args...);
#endif
  if (result != CUDA_SUCCESS) tensor_map_error() = int(result);
  return result;
}

}  // namespace peft_nvfp4

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define PEFT_NVFP4_cuTensorMapEncodeTiled peft_nvfp4::encode_tensor_map
#define PEFT_NVFP4_cuTensorMapEncodeIm2col cutlass::call_cuTensorMapEncodeIm2col
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) PEFT_NVFP4_##function
