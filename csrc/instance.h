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
};

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
// Fills the workspace: swizzled scales with zeros as padding, FP32 biases.
int prepare(peft_nvfp4_gemm_args const& args, int tile_k, Prepared const& prepared);

}  // namespace peft_nvfp4
