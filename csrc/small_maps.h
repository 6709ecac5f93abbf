// A workaround for drivers: tensor maps of small tensors on Blackwell.
//
// cuTensorMapEncodeTiled of NVIDIA's drivers (release notes of 595.71.05) may make a map that leads to "sporadic illegal memory
// accesses" on Blackwell where the tensor is smaller than 128 KB and not dense. The notes' way out, which CUTLASS from 4.3.4 and
// Triton take as well: clear bit 21 of the map's second 64-bit word. It is done whatever the driver's version says, since libraries
// for forward compatibility report newer versions than the driver that they run on. Maps of Hopper have another layout.
// Plain C++, so that it is tested where there is neither CUDA nor a GPU.
#pragma once
#include <stdint.h>

namespace peft_nvfp4 {

constexpr uint64_t kSmallTensorBytes = 128 << 10;

// Bytes from a tensor's first to its last row or batch: strides are in bytes, of all dimensions but the innermost.
inline uint64_t tensor_extent(unsigned rank, uint64_t innermost_bytes, uint64_t const* dims, uint64_t const* strides) {
  uint64_t extent = innermost_bytes;
  for (unsigned i = 1; i < rank; ++i) {
    uint64_t bytes = dims[i] * strides[i - 1];
    extent = bytes > extent ? bytes : extent;
  }
  return extent;
}

// capability_major: of the GPU that will read the map.
inline void clear_small_tensor_bit(void* map, uint64_t extent, int capability_major) {
  bool blackwell = capability_major >= 10 && capability_major <= 12;
  if (extent < kSmallTensorBytes && blackwell) static_cast<uint64_t*>(map)[1] &= ~(uint64_t(1) << 21);
}

}  // namespace peft_nvfp4
