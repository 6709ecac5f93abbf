// Operands as the kernels read them: one small launch before the GEMM.
//
// The package keeps block scales row by row. FP4 tensor cores read them in tiles of 128 rows and 4 columns (512 bytes; byte
// (r % 32) * 16 + (r // 32) * 4 + c of a tile is its element (r, c); tiles of one row of tiles follow each other). They are rearranged
// at every use: a 1/16 byte a value, read and written once, 0.5 % of a GEMM of 4096 rows; keeping them rearranged as well would cost
// an eighth of the weight's memory. Padding of a tile becomes zero, whatever the workspace held: a NaN there times a zero code is NaN.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "instance.h"

namespace peft_nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kTilesPerBlock = 8;  // 128 rows x 32 columns: 4 KiB
constexpr int kJobs = PEFT_NVFP4_TERMS + 2 * PEFT_NVFP4_PARTS;

struct Job {
  void const* from;
  void* to;
  int rows, columns;  // of scales; rows 0: a bias of `columns` BF16 numbers
  int first_block;
};

struct Jobs {
  Job job[kJobs];
  int count = 0, blocks = 0;

  void add(void const* from, void const* to, int64_t rows, int64_t columns, int64_t blocks_) {
    job[count++] = {from, const_cast<void*>(to), int(rows), int(columns), blocks};
    blocks += int(blocks_);
  }
};

__global__ void __launch_bounds__(kThreads) prepare_kernel(__grid_constant__ const Jobs jobs) {
  int index = 0;
  for (int i = 1; i < jobs.count; ++i) index = int(blockIdx.x) >= jobs.job[i].first_block ? i : index;
  Job const& job = jobs.job[index];
  int block = int(blockIdx.x) - job.first_block;
  int thread = int(threadIdx.x);
  if (job.rows == 0) {
    int i = block * kThreads + thread;
    if (i < job.columns) static_cast<float*>(job.to)[i] = __bfloat162float(static_cast<__nv_bfloat16 const*>(job.from)[i]);
    return;
  }
  __shared__ uint4 staged[kTilesPerBlock * 512 / 16];
  int tiles = (job.columns + 3) / 4;
  int across = (tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  int row0 = block / across * 128, tile0 = block % across * kTilesPerBlock;
  auto const* from = static_cast<unsigned char const*>(job.from);
  for (int word = thread; word < 128 * kTilesPerBlock; word += kThreads) {
    int r = word / kTilesPerBlock, tile = word % kTilesPerBlock;
    int row = row0 + r, column = (tile0 + tile) * 4;
    uint32_t value = 0;
    for (int c = 0; c < 4; ++c) {  // columns may be 2 modulo 4, so bytes
      if (row < job.rows && column + c < job.columns) value |= uint32_t(from[int64_t(row) * job.columns + column + c]) << (8 * c);
    }
    reinterpret_cast<uint32_t*>(staged)[tile * 128 + (r % 32) * 4 + r / 32] = value;
  }
  __syncthreads();
  auto* to = static_cast<uint4*>(job.to) + (int64_t(block / across) * tiles + tile0) * 32;
  int valid = min(kTilesPerBlock, tiles - tile0) * 32;
  for (int i = thread; i < valid; i += kThreads) to[i] = staged[i];
}

int64_t scale_blocks(int64_t rows, int64_t columns) { return (rows + 127) / 128 * ((columns + 31) / 32); }
int64_t scale_bytes(int64_t rows, int64_t columns) { return (rows + 127) / 128 * ((columns + 3) / 4) * 512; }

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

int64_t workspace_layout(peft_nvfp4_gemm_args const& args, int tile_k, Prepared* prepared) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    void const* at = static_cast<char const*>(args.workspace) + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  Prepared layout;
  int64_t columns = args.k / 16;
  layout.x_scales = take(args.terms * scale_bytes(args.m, columns));
  for (int i = 0; i < args.terms; ++i) layout.x_codes[i] = args.x_codes[i];
  for (int i = 0; i < args.parts; ++i) {
    auto const& part = args.part[i];
    layout.w_codes[i] = part.codes;
    layout.w_scales[i] = take(scale_bytes(part.n, columns));
    layout.bias[i] = static_cast<float const*>(part.bias);
    if (part.bias && part.bias_is_bf16) layout.bias[i] = static_cast<float const*>(take(4 * part.n));
  }
#ifdef PEFT_NVFP4_EMULATED
  for (int i = 0; i < args.terms; ++i) layout.x_codes[i] = take(spread_bytes(args.m, args.k, tile_k));
  for (int i = 0; i < args.parts; ++i) layout.w_codes[i] = take(spread_bytes(args.part[i].n, args.k, tile_k));
#endif
  (void)tile_k;
  if (prepared) *prepared = layout;
  return used;
}

int prepare(peft_nvfp4_gemm_args const& args, int tile_k, Prepared const& prepared) {
  Jobs jobs;
  int64_t columns = args.k / 16;
  for (int i = 0; i < args.terms; ++i) {
    jobs.add(args.x_scales[i], static_cast<char const*>(prepared.x_scales) + i * scale_bytes(args.m, columns), args.m, columns,
             scale_blocks(args.m, columns));
  }
  for (int i = 0; i < args.parts; ++i) {
    auto const& part = args.part[i];
    jobs.add(part.scales, prepared.w_scales[i], part.n, columns, scale_blocks(part.n, columns));
    if (part.bias && part.bias_is_bf16) jobs.add(part.bias, prepared.bias[i], 0, part.n, (part.n + kThreads - 1) / kThreads);
  }
  auto stream = static_cast<cudaStream_t>(args.stream);
  prepare_kernel<<<jobs.blocks, kThreads, 0, stream>>>(jobs);
#ifdef PEFT_NVFP4_EMULATED
  for (int i = 0; i < args.terms; ++i) spread(args.x_codes[i], prepared.x_codes[i], args.m, args.k, tile_k, stream);
  for (int i = 0; i < args.parts; ++i) spread(args.part[i].codes, prepared.w_codes[i], args.part[i].n, args.k, tile_k, stream);
#endif
  (void)tile_k;
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? kSuccess : kPrepare + int(error);
}

}  // namespace peft_nvfp4
