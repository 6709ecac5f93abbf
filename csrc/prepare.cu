// Operands as the kernels read them: one small launch before the GEMM.
//
// The package keeps block scales row by row. FP4 tensor cores read them in tiles of 128 rows and 4 columns (512 bytes; byte
// (r % 32) * 16 + (r // 32) * 4 + c of a tile is its element (r, c); tiles of one row of tiles follow each other). They are rearranged
// here, unless the caller says that they are in tiles already: a 1/16 byte a value, read and written once, 0.5 % of a GEMM of 4096 rows.
// Padding of a tile becomes zero, whatever the workspace held: a NaN there times a zero code is NaN.
//
// The low-rank product h @ up.T is added up with the products of codes, which the epilogue multiplies by the global scales of row and
// weight. So h is divided by them first.
//
// The GEMM is launched while this kernel still runs (programmatic dependent launch): its blocks set up their barriers and fetch their
// descriptors, and wait before they read what is written here (collectives.cuh).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "instance.h"

namespace peft_nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kTilesPerBlock = 8;  // 128 rows x 32 columns: 4 KiB
constexpr int kJobs = PEFT_NVFP4_TERMS + 3 * PEFT_NVFP4_PARTS;

enum Kind : int { kScales, kBias, kHidden };

struct Job {
  void const* from;
  void* to;
  Kind kind;
  int rows, columns;  // a bias is `columns` BF16 numbers
  int64_t pitch;      // of h
  float const* row_scale;  // and the next two: what h is divided by
  float const* weight_scale;
  int row_scale_stride;
  int first_block;
};

struct Jobs {
  Job job[kJobs];
  int count = 0, blocks = 0;

  Job& add(Kind kind, void const* from, void const* to, int64_t rows, int64_t columns, int64_t blocks_) {
    job[count] = {from, const_cast<void*>(to), kind, int(rows), int(columns), 0, nullptr, nullptr, 0, blocks};
    blocks += int(blocks_);
    return job[count++];
  }
};

__device__ void widen_bias(Job const& job, int block) {
  int i = block * kThreads + int(threadIdx.x);
  if (i < job.columns) static_cast<float*>(job.to)[i] = __bfloat162float(static_cast<__nv_bfloat16 const*>(job.from)[i]);
}

// One thread for 8 columns of a row, which are written at once; columns past the rank become zero.
__device__ void divide_hidden(Job const& job, int block) {
  int across = (job.columns + 7) / 8;
  int64_t i = int64_t(block) * kThreads + threadIdx.x, row = i / across;
  if (row >= job.rows) return;
  int column = int(i % across) * 8;
  auto const* from = static_cast<__nv_bfloat16 const*>(job.from) + row * job.pitch + column;
  float row_scale = job.row_scale[row * job.row_scale_stride], weight_scale = *job.weight_scale;
  __align__(16) __nv_bfloat16 out[8];
  for (int j = 0; j < 8; ++j) {  // two divisions: the product of the scales could underflow
    float value = column + j < job.columns ? __bfloat162float(from[j]) : 0.f;
    out[j] = __float2bfloat16_rn(__fdiv_rn(__fdiv_rn(value, row_scale), weight_scale));
  }
  static_cast<uint4*>(job.to)[i] = *reinterpret_cast<uint4 const*>(out);
}

// Four scales of a row as a word; zeros past the matrix. Columns may be 2 modulo 4, and then words lie at any address.
__device__ uint32_t four_scales(Job const& job, int row, int column) {
  if (row >= job.rows) return 0;
  auto const* from = static_cast<unsigned char const*>(job.from) + int64_t(row) * job.columns;
  bool whole = job.columns % 4 == 0 && reinterpret_cast<uintptr_t>(job.from) % 4 == 0;
  if (whole) return column < job.columns ? *reinterpret_cast<uint32_t const*>(from + column) : 0;
  uint32_t value = 0;
  for (int c = 0; c < 4; ++c) {
    if (column + c < job.columns) value |= uint32_t(from[column + c]) << (8 * c);
  }
  return value;
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(__grid_constant__ const Jobs jobs) {
  asm volatile("griddepcontrol.launch_dependents;");
  int index = 0;
  for (int i = 1; i < jobs.count; ++i) index = int(blockIdx.x) >= jobs.job[i].first_block ? i : index;
  Job const& job = jobs.job[index];
  int block = int(blockIdx.x) - job.first_block;
  int thread = int(threadIdx.x);
  if (job.kind == kBias) return widen_bias(job, block);
  if (job.kind == kHidden) return divide_hidden(job, block);
  __shared__ uint4 staged[kTilesPerBlock * 512 / 16];
  int tiles = (job.columns + 3) / 4;
  int across = (tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  int row0 = block / across * 128, tile0 = block % across * kTilesPerBlock;
  for (int word = thread; word < 128 * kTilesPerBlock; word += kThreads) {
    int r = word / kTilesPerBlock, tile = word % kTilesPerBlock;
    reinterpret_cast<uint32_t*>(staged)[tile * 128 + (r % 32) * 4 + r / 32] = four_scales(job, row0 + r, (tile0 + tile) * 4);
  }
  __syncthreads();
  auto* to = static_cast<uint4*>(job.to) + (int64_t(block / across) * tiles + tile0) * 32;
  int valid = min(kTilesPerBlock, tiles - tile0) * 32;
  for (int i = thread; i < valid; i += kThreads) to[i] = staged[i];
}

int64_t scale_blocks(int64_t rows, int64_t columns) { return (rows + 127) / 128 * ((columns + 31) / 32); }
int64_t hidden_blocks(int64_t rows, int64_t rank) { return (rows * hidden_pitch(rank) / 8 + kThreads - 1) / kThreads; }

#ifdef PEFT_NVFP4_EMULATED
// TMA of Hopper has no 4-bit type; the stand-in (emulated/emulated.cuh) reads tiles of tile_k codes, each with as many bytes of padding.
int64_t spread_bytes(int64_t rows, int64_t k, int tile_k) { return rows * ((k + tile_k - 1) / tile_k * tile_k); }

__global__ void spread_kernel(unsigned char const* from, unsigned char* to, int64_t rows, int64_t k, int64_t pitch, int tile_k) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * pitch; i += int64_t(gridDim.x) * blockDim.x) {
    int64_t row = i / pitch, at = i % pitch;
    int64_t byte = at / tile_k * (tile_k / 2) + at % tile_k;
    bool code = at % tile_k < tile_k / 2 && byte < k / 2;
    to[i] = code ? from[row * (k / 2) + byte] : 0x5a;  // padding that would be noticed
    if (!code && at % tile_k < tile_k / 2) to[i] = 0;  // what TMA fills in past the end of a row
  }
}

void spread(void const* from, void const* to, int64_t rows, int64_t k, int tile_k, cudaStream_t stream) {
  int64_t pitch = spread_bytes(1, k, tile_k);
  spread_kernel<<<1024, 256, 0, stream>>>(static_cast<unsigned char const*>(from),
                                          static_cast<unsigned char*>(const_cast<void*>(to)), rows, k, pitch, tile_k);
}
#endif

}  // namespace

int64_t scale_bytes(int64_t rows, int64_t columns) { return (rows + 127) / 128 * ((columns + 3) / 4) * 512; }

int64_t workspace_layout(peft_nvfp4_gemm_args const& args, int tile_k, Prepared* prepared) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    void const* at = static_cast<char const*>(args.workspace) + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  Prepared layout;
  int64_t columns = args.k / 16;
  layout.x_scales = args.x_scales_swizzled ? args.x_scales[0] : take(args.terms * scale_bytes(args.m, columns));
  for (int i = 0; i < args.terms; ++i) layout.x_codes[i] = args.x_codes[i];
  for (int i = 0; i < args.parts; ++i) {
    auto const& part = args.part[i];
    layout.w_codes[i] = part.codes;
    layout.w_scales[i] = part.scales_swizzled ? part.scales : take(scale_bytes(part.n, columns));
    layout.bias[i] = static_cast<float const*>(part.bias);
    if (part.bias && part.bias_is_bf16) layout.bias[i] = static_cast<float const*>(take(4 * part.n));
    if (part.rank) layout.h[i] = take(2 * args.m * hidden_pitch(part.rank));
  }
#ifdef PEFT_NVFP4_EMULATED
  for (int i = 0; i < args.terms; ++i) layout.x_codes[i] = take(spread_bytes(args.m, args.k, tile_k));
  for (int i = 0; i < args.parts; ++i) layout.w_codes[i] = take(spread_bytes(args.part[i].n, args.k, tile_k));
#endif
  (void)tile_k;
  if (prepared) *prepared = layout;
  return used;
}

int prepare(peft_nvfp4_gemm_args const& args, int tile_k, Prepared& prepared) {
  Jobs jobs;
  int64_t columns = args.k / 16;
  for (int i = 0; i < (args.x_scales_swizzled ? 0 : args.terms); ++i) {
    jobs.add(kScales, args.x_scales[i], static_cast<char const*>(prepared.x_scales) + i * scale_bytes(args.m, columns), args.m, columns,
             scale_blocks(args.m, columns));
  }
  for (int i = 0; i < args.parts; ++i) {
    auto const& part = args.part[i];
    if (!part.scales_swizzled) jobs.add(kScales, part.scales, prepared.w_scales[i], part.n, columns, scale_blocks(part.n, columns));
    if (part.bias && part.bias_is_bf16) jobs.add(kBias, part.bias, prepared.bias[i], 1, part.n, (part.n + kThreads - 1) / kThreads);
    if (part.rank) {
      Job& job = jobs.add(kHidden, part.h, prepared.h[i], args.m, part.rank, hidden_blocks(args.m, part.rank));
      job.pitch = part.ldh, job.row_scale = args.x_gscale, job.row_scale_stride = args.x_gscale_rows > 1, job.weight_scale = part.gscale;
    }
  }
  auto stream = static_cast<cudaStream_t>(args.stream);
#ifdef PEFT_NVFP4_EMULATED
  for (int i = 0; i < args.terms; ++i) spread(args.x_codes[i], prepared.x_codes[i], args.m, args.k, tile_k, stream);
  for (int i = 0; i < args.parts; ++i) spread(args.part[i].codes, prepared.w_codes[i], args.part[i].n, args.k, tile_k, stream);
#endif
  (void)tile_k;
  prepared.launched = jobs.blocks > 0;
  if (prepared.launched) prepare_kernel<<<jobs.blocks, kThreads, 0, stream>>>(jobs);
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? kSuccess : kPrepare + int(error);
}

}  // namespace peft_nvfp4
