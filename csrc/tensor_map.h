// CUTLASS writes a descriptor that the driver refuses to stderr and goes on; here the refusal is kept, to be returned. Descriptors of
// small tensors get a workaround (small_maps.h), which CUTLASS has from 4.3.4 on.
//
// Every descriptor is made through CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled), which is taken over before any header of
// CuTe is read. In the emulated build the function called in the end is the one of emulated/emulated.cuh.
#pragma once
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "small_maps.h"

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

inline uint64_t innermost_bytes(CUtensorMapDataType type, uint64_t elements) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B: return elements / 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return elements;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16: case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return elements * 2;
    default: return elements * 4;
  }
}

inline int capability_major() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major;
}

template <class... Args>
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* dims,
                           cuuint64_t const* strides, Args... args) {
#ifdef PEFT_NVFP4_EMULATED
  CUresult result = encode_bytes(map, type, rank, address, dims, strides, args...);
#else
  CUresult result = cutlass::call_cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, args...);
#endif
  if (result != CUDA_SUCCESS) {
    tensor_map_error() = int(result);
    return result;
  }
  static_assert(sizeof(cuuint64_t) == sizeof(uint64_t), "as small_maps.h takes them");
  uint64_t extent = tensor_extent(rank, innermost_bytes(type, dims[0]), reinterpret_cast<uint64_t const*>(dims),
                                  reinterpret_cast<uint64_t const*>(strides));
  if (extent < kSmallTensorBytes) clear_small_tensor_bit(map, extent, capability_major());
  return result;
}

}  // namespace peft_nvfp4

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define PEFT_NVFP4_cuTensorMapEncodeTiled peft_nvfp4::encode_tensor_map
#define PEFT_NVFP4_cuTensorMapEncodeIm2col cutlass::call_cuTensorMapEncodeIm2col
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) PEFT_NVFP4_##function
