// What the instances and the entry share.
#pragma once
#include "abi.h"

namespace peft_nvfp4 {

// Operands in the layout that the kernels read, all in the workspace or the caller's memory.
struct Prepared {
  void const* x_codes[PEFT_NVFP4_TERMS] = {};
  void const* x_scales = nullptr;  // swizzled, term after term
  void const* w_codes[PEFT_NVFP4_PARTS] = {};
  void const* w_scales[PEFT_NVFP4_PARTS] = {};  // swizzled
  float const* bias[PEFT_NVFP4_PARTS] = {};     // FP32 or null
  void const* h[PEFT_NVFP4_PARTS] = {};         // BF16, divided by the global scales; null where there is none
  bool launched = false;  // a kernel writes them, the last one on the stream
};

// Elements from row to row of Prepared::h.
inline int64_t hidden_pitch(int64_t rank) { return (rank + 7) / 8 * 8; }

struct Instance {
  char const* name;
  char const* text;  // "tile_m tile_n tile_k schedule c d"
  int tile_k, stages, smem_bytes, c_bytes, d_bytes;
  int (*run)(peft_nvfp4_gemm_args const&, Prepared const&);
};

enum Code : int {
  kSuccess = 0,
  kVersion,
  kInstance,
  kTerms,
  kParts,
  kShape,
  kK,
  kXCodes,
  kXScales,
  kXGscale,
  kXGscaleRows,
  kPartN,
  kPartCodes,
  kPartScales,
  kPartGscale,
  kPartC,
  kPartD,
  kPartPitch,
  kPartRank,
  kPartUp,
  kSwizzled,
  kWorkspace,
  kWorkspaceBytes,
  kCodes,              // number of codes
  kPrepare = 1000,     // plus a cudaError_t, and so on
  kTensorMap = 2000,   // plus a CUresult
  kAttribute = 3000,
  kLaunch = 4000,
};

// Bytes of workspace, and with `prepared` the layout of it (addresses from args.workspace).
int64_t workspace_layout(peft_nvfp4_gemm_args const& args, int tile_k, Prepared* prepared);
int64_t scale_bytes(int64_t rows, int64_t columns);  // of swizzled scales
// Fills the workspace: swizzled scales with zeros as padding, FP32 biases, scaled h. Nothing is launched where nothing is to be done.
int prepare(peft_nvfp4_gemm_args const& args, int tile_k, Prepared& prepared);

}  // namespace peft_nvfp4
