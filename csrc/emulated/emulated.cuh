// Test only: what lets the SM120 GEMM run on a Hopper GPU, to check tiles, pipelines, scale layout, tails and epilogues there.
//
// Two things of SM120 are missing on Hopper; they are replaced before any CUTLASS header is read.
// * The instruction mma...kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64 becomes shuffles and integer arithmetic (arithmetic.h: the
//   bits of the instruction, as far as they are known), with the operand layout of the PTX manual. In a warp, lane = 4 * g + t (g < 8, t < 4) holds
//     A: rows g (registers 0, 2) and g + 8 (1, 3); k = 8t..8t+7 (0, 1) and 32+8t.. (2, 3), k ascending from the low nibble
//     B: column g; k = 8t.. (0) and 32+8t.. (1)
//     scales: 4 bytes, one for 16 k. Of row g: lane 4g; of row g + 8: lane 4g + 1; of column g: lane 4g
//     C: rows g (0, 1) and g + 8 (2, 3); columns 2t, 2t + 1
// * TMA loads of packed 4-bit elements become loads of bytes. Coordinates stay in elements, so operands are laid out one byte per
//   element, of which only the first half of every tile is codes (prepare.cu).
// What this cannot check: that the hardware's instruction does what arithmetic.h says.
#pragma once
#include "cutlass/cutlass.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "emulated/arithmetic.h"
#include "emulated/faults.h"

#include <map>
#include <vector>

namespace peft_nvfp4 {

// The fault "stale tensor map": the first map made for these sizes.
inline void make_stale(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, const cuuint64_t* dims, const cuuint32_t* box) {
  static thread_local std::map<std::vector<uint64_t>, CUtensorMap> made;
  std::vector<uint64_t> key{uint64_t(type)};
  for (unsigned i = 0; i < rank; ++i) key.push_back(dims[i]), key.push_back(box[i]);
  *map = made.emplace(key, *map).first->second;
}

inline CUresult encode_bytes(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims,
                                  const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                                  CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                  CUtensorMapFloatOOBfill fill) {
  cuuint64_t new_dims[5], new_strides[5];
  cuuint32_t new_box[5];
  for (unsigned i = 0; i < rank; ++i) {
    new_dims[i] = dims[i];
    new_box[i] = box[i];
    if (i + 1 < rank) new_strides[i] = strides[i];
  }
  if (type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B) {
    type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    new_dims[0] = (dims[0] + box[0] - 1) / box[0] * box[0];
    for (unsigned i = 0; i + 1 < rank; ++i) new_strides[i] = i == 0 ? new_dims[0] : 2 * strides[i];
    new_box[0] = box[0] / 2;
    if (host_fault() == kWrongSwizzle) swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  } else if (type != CU_TENSOR_MAP_DATA_TYPE_UINT16 && host_fault() == kTileSkipped && dims[0] > 128) {
    new_dims[0] = (dims[0] - 1) / 128 * 128;
  }
  CUresult result = cutlass::call_cuTensorMapEncodeTiled(map, type, rank, address, new_dims, new_strides, new_box, steps, interleave,
                                                         swizzle, promotion, fill);
  if (result == CUDA_SUCCESS && host_fault() == kStaleTensorMap) make_stale(map, type, rank, dims, box);
  return result;
}

}  // namespace peft_nvfp4

#include "cute/arch/mma_sm120.hpp"
#include "cute/config.hpp"

namespace peft_nvfp4 {

// Out of line: inlined at each of its places in the unrolled main loop, it takes the compiler many minutes.
static __device__ __noinline__ float4 block_scaled_mma(uint4 a, uint2 b, float4 c, uint32_t scale_a, uint32_t scale_b) {
  int lane = threadIdx.x & 31, g4 = lane & ~3, t8 = 8 * (lane & 3);
  uint32_t row1 = __shfl_sync(~0u, scale_a, g4 + 1);
  uint32_t row0 = __shfl_sync(~0u, scale_a, g4 + (device_fault == kWrongLane));
  uint32_t column0 = __shfl_sync(~0u, scale_b, t8), column1 = __shfl_sync(~0u, scale_b, t8 + 4);
  int dot[4][4];  // of the four outputs, for each block
#pragma unroll
  for (int block = 0; block < 4; ++block) {  // 16 values of k: two lanes of a quad, in the lower or upper registers
    for (int i = 0; i < 4; ++i) dot[i][block] = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      int from = (block & 1) * 2 + half;
      uint32_t a0 = __shfl_sync(~0u, block < 2 ? a.x : a.z, g4 + from), a1 = __shfl_sync(~0u, block < 2 ? a.y : a.w, g4 + from);
      uint32_t b0 = __shfl_sync(~0u, block < 2 ? b.x : b.y, t8 + from), b1 = __shfl_sync(~0u, block < 2 ? b.x : b.y, t8 + 4 + from);
      dot[0][block] += dot_of_8(a0, b0), dot[1][block] += dot_of_8(a0, b1);
      dot[2][block] += dot_of_8(a1, b0), dot[3][block] += dot_of_8(a1, b1);
    }
  }
  uint32_t mask = device_fault == kDroppedCarry ? 0xffff0000u : ~0u;
  return make_float4(__uint_as_float(mask & block_scaled_sum(dot[0], row0, column0, __float_as_uint(c.x))),
                     __uint_as_float(mask & block_scaled_sum(dot[1], row0, column1, __float_as_uint(c.y))),
                     __uint_as_float(mask & block_scaled_sum(dot[2], row1, column0, __float_as_uint(c.z))),
                     __uint_as_float(mask & block_scaled_sum(dot[3], row1, column1, __float_as_uint(c.w))));
}

}  // namespace peft_nvfp4

namespace cute::SM120::BLOCKSCALED {

template <>
struct SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t, 16> {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];
  static constexpr int SFBits = 32;
  using RegTypeSF = uint_bit_t<SFBits>;
  using SFARegisters = RegTypeSF[1];
  using SFBRegisters = RegTypeSF[1];

  CUTE_HOST_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0, uint32_t const& a1,
                                   uint32_t const& a2, uint32_t const& a3, uint32_t const& b0, uint32_t const& b1, float const& c0,
                                   float const& c1, float const& c2, float const& c3, RegTypeSF const& sfa, RegTypeSF const& sfb) {
#if defined(__CUDA_ARCH__)
    float4 d = peft_nvfp4::block_scaled_mma({a0, a1, a2, a3}, {b0, b1}, make_float4(c0, c1, c2, c3), sfa, sfb);
    d0 = d.x, d1 = d.y, d2 = d.z, d3 = d.w;
#endif
  }
};

}  // namespace cute::SM120::BLOCKSCALED
