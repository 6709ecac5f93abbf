// Test only: the arithmetic inside mma...kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64, in integers, on the device or on the host.
//
// One output is d = c + sum over the 4 blocks of 16 k of scale_a * scale_b * (codes of a times codes of b). The instruction aligns c
// and the four block sums to the largest of their exponents, keeps 35 bits behind the point of that exponent, cuts off the rest of
// each summand, adds without error and cuts the sum off to FP32 (round toward zero). As long as the summands' exponents span less
// than about 2**11, nothing is cut off before the end: the sum is exact.
// Source: MMA-Sim (github.com/microsoft/MMA-Sim, "RTX Blackwell", mma_block_scale of k = 64), a model fitted to the hardware's bits.
// The exponent of a block sum is that of its two scales, whatever its codes sum up to.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define PEFT_NVFP4_ANYWHERE __host__ __device__ __forceinline__
#else
#define PEFT_NVFP4_ANYWHERE inline
#endif

namespace peft_nvfp4 {

constexpr int kKeptBits = 35;     // behind the point of the largest exponent
constexpr int kNoExponent = -126; // what a zero counts as

// Twice an E2M1 value.
PEFT_NVFP4_ANYWHERE int twice_e2m1(uint32_t code) {
  uint32_t magnitude = code & 7u;
  int value = magnitude < 2 ? int(magnitude) : int((2u | (magnitude & 1u)) << (magnitude / 2 - 1));
  return code & 8u ? -value : value;
}

// Four times the product of 8 pairs of codes.
PEFT_NVFP4_ANYWHERE int dot_of_8(uint32_t a, uint32_t b) {
  int sum = 0;
  for (int shift = 0; shift < 32; shift += 4) sum += twice_e2m1(a >> shift) * twice_e2m1(b >> shift);
  return sum;
}

// A scale as eighths * 2**exponent / 8; the sign bit is not looked at.
PEFT_NVFP4_ANYWHERE void split_ue4m3(uint32_t bits, int& eighths, int& exponent) {
  int field = int(bits >> 3) & 15, mantissa = int(bits) & 7;
  eighths = field ? 8 + mantissa : mantissa;
  exponent = field ? field - 7 : mantissa ? -6 : kNoExponent;
}

PEFT_NVFP4_ANYWHERE bool is_nan_ue4m3(uint32_t bits) { return (bits & 0x7fu) == 0x7fu; }

// value * 2**left, cut off toward zero.
PEFT_NVFP4_ANYWHERE int64_t shifted(int64_t value, int left) {
  if (left >= 0) return value * (int64_t(1) << left);
  if (left < -62) return 0;
  int64_t magnitude = (value < 0 ? -value : value) >> -left;
  return value < 0 ? -magnitude : magnitude;
}

PEFT_NVFP4_ANYWHERE int leading_zeros(uint64_t value) {
#ifdef __CUDA_ARCH__
  return __clzll(static_cast<long long>(value));
#else
  return __builtin_clzll(value);
#endif
}

// The bits of the FP32 number value * 2**exponent, cut off toward zero.
PEFT_NVFP4_ANYWHERE uint32_t cut_off_to_f32(int64_t value, int exponent) {
  if (value == 0) return 0;
  uint64_t magnitude = value < 0 ? uint64_t(-value) : uint64_t(value);
  uint32_t sign = value < 0 ? 0x80000000u : 0u;
  int power = 63 - leading_zeros(magnitude) + exponent;  // of the leading bit
  if (power > 127) return sign | 0x7f800000u;
  bool subnormal = power < -126;
  int left = exponent - ((subnormal ? -126 : power) - 23);
  uint32_t significand = uint32_t(left >= 0 ? magnitude << left : left < -63 ? 0 : magnitude >> -left);
  return sign | (subnormal ? significand : (uint32_t(power + 127) << 23) | (significand & 0x7fffffu));
}

// d of one output. dot: four times the sum of the products of the codes, for each of the 4 blocks; scales: 4 bytes, block 0 lowest;
// c and the result are the bits of FP32 numbers.
PEFT_NVFP4_ANYWHERE uint32_t block_scaled_sum(int const* dot, uint32_t scales_a, uint32_t scales_b, uint32_t c) {
  int c_field = int(c >> 23) & 255;
  bool nan = c_field == 255 && (c & 0x7fffffu);
  int significand[4], exponent[4];
  int c_exponent = c_field ? c_field - 127 : kNoExponent;
  int largest = c_exponent;
  for (int block = 0; block < 4; ++block) {
    uint32_t a = scales_a >> (8 * block), b = scales_b >> (8 * block);
    nan = nan || is_nan_ue4m3(a) || is_nan_ue4m3(b);
    int eighths_a, eighths_b, exponent_a, exponent_b;
    split_ue4m3(a, eighths_a, exponent_a);
    split_ue4m3(b, eighths_b, exponent_b);
    significand[block] = dot[block] * eighths_a * eighths_b;  // 2**8 times the block's sum without its exponent
    exponent[block] = exponent_a + exponent_b;
    largest = exponent[block] > largest ? exponent[block] : largest;
  }
  if (nan) return 0x7fffffffu;
  if (c_field == 255) return c;
  int64_t c_significand = int64_t(c & 0x7fffffu) | (c_field ? 0x800000 : 0);  // 2**23 times it
  int64_t sum = shifted(c >> 31 ? -c_significand : c_significand, kKeptBits - 23 + c_exponent - largest);
  for (int block = 0; block < 4; ++block) sum += shifted(significand[block], kKeptBits - 8 + exponent[block] - largest);
  return cut_off_to_f32(sum, largest - kKeptBits);
}

}  // namespace peft_nvfp4
