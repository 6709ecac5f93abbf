// The C symbols: argument checks, then prepare and run. The table of instances is written by generate.py.
#include <cstdio>
#include <cuda_runtime.h>

#include "instance.h"

namespace peft_nvfp4 {
extern Instance const instances[];
extern int const instance_count;
extern char const* const build_info;

namespace {

bool aligned(void const* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// What holds of sizes alone.
int check_sizes(peft_nvfp4_gemm_args const& a) {
  if (a.version != PEFT_NVFP4_ABI) return kVersion;
  if (a.instance < 0 || a.instance >= instance_count) return kInstance;
  if (a.terms < 1 || a.terms > PEFT_NVFP4_TERMS) return kTerms;
  if (a.parts < 1 || a.parts > PEFT_NVFP4_PARTS) return kParts;
  if (a.m < 1 || a.m > INT32_MAX / 2 || a.k < 32 || a.k > INT32_MAX / 4) return kShape;
  if (a.k % 32) return kK;
  int64_t columns = 0;
  for (int i = 0; i < a.parts; ++i) {
    if (a.part[i].n < 1 || (columns += a.part[i].n) > INT32_MAX / 2) return kPartN;
    if (a.part[i].rank < 0 || a.part[i].rank > PEFT_NVFP4_RANK) return kPartRank;
  }
  return kSuccess;
}

int check_part(peft_nvfp4_gemm_args const& a, peft_nvfp4_part const& part, Instance const& instance) {
  if (!part.codes || !aligned(part.codes, 16)) return kPartCodes;
  if (!part.scales) return kPartScales;
  if (!part.gscale || !aligned(part.gscale, 4)) return kPartGscale;
  if (!part.d || !aligned(part.d, 16)) return kPartD;
  if (instance.c_bytes ? !part.c || !aligned(part.c, 16) : part.c != nullptr) return kPartC;
  if (part.ldd < part.n || part.ldd * instance.d_bytes % 16) return kPartPitch;
  if (instance.c_bytes && (part.ldc < part.n || part.ldc * instance.c_bytes % 16)) return kPartPitch;
  if (part.rank && (!part.h || part.ldh < part.rank)) return kPartRank;
  if (part.rank && (!part.up || !aligned(part.up, 16) || part.ldup < part.rank || part.ldup % 8)) return kPartUp;
  if (part.scales_swizzled && !aligned(part.scales, 128)) return kSwizzled;
  return kSuccess;
}

// Swizzled scales of x are one tensor to the TMA unit.
bool one_after_the_other(peft_nvfp4_gemm_args const& a) {
  auto first = static_cast<char const*>(a.x_scales[0]);
  return aligned(first, 128) && (a.terms == 1 || a.x_scales[1] == first + scale_bytes(a.m, a.k / 16));
}

int check(peft_nvfp4_gemm_args const& a) {
  if (int code = check_sizes(a)) return code;
  for (int i = 0; i < a.terms; ++i) {
    if (!a.x_codes[i] || !aligned(a.x_codes[i], 16)) return kXCodes;
    if (!a.x_scales[i]) return kXScales;
  }
  if (a.x_scales_swizzled && !one_after_the_other(a)) return kSwizzled;
  if (!a.x_gscale || !aligned(a.x_gscale, 4)) return kXGscale;
  if (a.x_gscale_rows != 1 && a.x_gscale_rows != a.m) return kXGscaleRows;
  for (int i = 0; i < a.parts; ++i) {
    if (int code = check_part(a, a.part[i], instances[a.instance])) return code;
  }
  if (!a.workspace || !aligned(a.workspace, 256)) return kWorkspace;
  if (a.workspace_bytes < workspace_layout(a, instances[a.instance].tile_k, nullptr)) return kWorkspaceBytes;
  return kSuccess;
}

// The CUDA runtime inside this library is the toolkit's: a driver of an older major version does not serve it, whatever torch is for.
char const* remedy() {
  thread_local char line[160];
  int driver = 0;
  cudaDriverGetVersion(&driver);
  snprintf(line, sizeof line, ": built with CUDA %d.%d, the driver is for CUDA %d.%d. Update the driver, or build with that CUDA's nvcc",
           CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000, driver % 1000 / 10);
  return line;
}

char const* const texts[kCodes] = {
    "success",
    "version: the library and its caller were built for different versions of the interface (abi.h)",
    "instance: an index into the table of peft_nvfp4_describe",
    "terms: x has 1 or 2 terms",
    "parts: a launch takes 1 to 4 weights",
    "m, k: at least 1 row and 32 columns, at most 2**30 rows and 2**29 columns",
    "k: a multiple of 32, as the package stores it",
    "x_codes: an address on the device, a multiple of 16, for each term",
    "x_scales: an address on the device for each term",
    "x_gscale: an address on the device, a multiple of 4",
    "x_gscale_rows: m, or 1 for one scale of all rows",
    "part.n: at least 1 row each, at most 2**30 together",
    "part.codes: an address on the device, a multiple of 16",
    "part.scales: an address on the device",
    "part.gscale: an address on the device, a multiple of 4",
    "part.c: an address on the device, a multiple of 16, if and only if the instance adds c",
    "part.d: an address on the device, a multiple of 16",
    "part.ldc, part.ldd: at least n, and a multiple of 16 bytes",
    "part.rank: 0 to 256, and h an address on the device with ldh at least the rank",
    "part.up: an address on the device, a multiple of 16, with ldup at least the rank and a multiple of 8",
    "swizzled scales: an address that is a multiple of 128; those of x's second term right after the first one's",
    "workspace: an address on the device, a multiple of 256",
    "workspace_bytes: at least what peft_nvfp4_workspace says",
};

}  // namespace
}  // namespace peft_nvfp4

using namespace peft_nvfp4;

extern "C" int peft_nvfp4_abi(void) { return PEFT_NVFP4_ABI; }

extern "C" int peft_nvfp4_gemm(const peft_nvfp4_gemm_args* args) {
  if (int code = check(*args)) return code;
  Instance const& instance = instances[args->instance];
  Prepared prepared;
  workspace_layout(*args, instance.tile_k, &prepared);
  if (int code = prepare(*args, instance.tile_k, prepared)) return code;
  return instance.run(*args, prepared);
}

extern "C" int64_t peft_nvfp4_workspace(const peft_nvfp4_gemm_args* args) {
  if (int code = check_sizes(*args)) return -code;
  return workspace_layout(*args, instances[args->instance].tile_k, nullptr);
}

extern "C" int64_t peft_nvfp4_scale_bytes(int64_t rows, int64_t k) { return scale_bytes(rows, k / 16); }

extern "C" const char* peft_nvfp4_error(int code) {
  thread_local char line[384];
  if (code >= 0 && code < kCodes) return texts[code];
  if (code < kPrepare || code >= kLaunch + 1000) return "unknown code";
  char const* const steps[] = {"rearranging scales", "describing an operand to the TMA unit", "asking for shared memory", "launching the GEMM"};
  int step = code / 1000 - 1, error = code % 1000;
  char const* what = step == 1 ? "the driver refused an address, a size or a pitch" : cudaGetErrorString(cudaError_t(error));
  snprintf(line, sizeof line, "%s: %s (CUDA error %d)%s", steps[step], what, error,
           step != 1 && error == cudaErrorInsufficientDriver ? remedy() : "");
  return line;
}

extern "C" const char* peft_nvfp4_describe(int i) {
  if (i < 0 || i >= instance_count) return nullptr;
  thread_local char line[256];
  Instance const& x = instances[i];
  snprintf(line, sizeof line, "%s %s %d %d", x.name, x.text, x.stages, x.smem_bytes);
  return line;
}

extern "C" const char* peft_nvfp4_build_info(void) { return build_info; }
