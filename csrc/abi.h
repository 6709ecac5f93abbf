/* The C interface of the SM120 extension: plain symbols, so that one binary serves every Python and torch version.
 *
 * y[m, n] = x_gscale[m] * w_gscale * sum_t sum_k x_t[m, k] * w[n, k]  + sum_r h[m, r] * up[n, r]  + bias[n] + c[m, n]
 *
 * x_t (1 or 2 terms with one scale per row) and w are E2M1 codes (low nibble = even k) with one E4M3 scale for 16 codes along k;
 * h and up are BF16 (LoRA). The sums are FP32, everything else happens in FP32 before the one rounding of y. h is divided by
 * x_gscale[m] * w_gscale and rounded to BF16 first, since it is summed with the codes: exact where global scales are powers of two. A call computes up to PEFT_NVFP4_PARTS products
 * of the same x in one launch; each part has its own weight, scale, bias, c and y. Nothing here allocates or synchronises.
 * The fields are read by Python through ctypes (kernels/fp4/cutlass.py): change one, change PEFT_NVFP4_ABI. */
#pragma once
#include <stdint.h>

#define PEFT_NVFP4_ABI 2
#define PEFT_NVFP4_TERMS 2
#define PEFT_NVFP4_PARTS 4
#define PEFT_NVFP4_RANK 256

#ifdef _WIN32
#define PEFT_NVFP4_API __declspec(dllexport)
#else
#define PEFT_NVFP4_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct peft_nvfp4_part {
  int64_t n;             /* rows of the weight */
  const void* codes;     /* (n, k/2) bytes, row-major, address a multiple of 16 */
  const void* scales;    /* (n, k/16) E4M3 bytes, row-major; swizzled where scales_swizzled says so */
  const float* gscale;   /* one number on the device */
  const void* bias;      /* (n,) or null */
  const void* c;         /* (m, n) of the instance's type of c, rows ldc apart; null where the instance has no c */
  void* d;               /* (m, n) of the instance's type of d, rows ldd apart */
  const void* h;         /* (m, rank) BF16, rows ldh apart, any address; not looked at where rank is 0 */
  const void* up;        /* (n, rank) BF16, rows ldup apart, address a multiple of 16 */
  int64_t ldc, ldd;      /* in elements; times the element's size a multiple of 16 bytes */
  int64_t ldh, ldup;     /* in elements; ldup a multiple of 8 */
  int32_t bias_is_bf16;  /* 0: bias is FP32 */
  int32_t rank;          /* at most PEFT_NVFP4_RANK; 0: no h @ up.T */
  int32_t scales_swizzled; /* 1: scales are in tiles as peft_nvfp4_scale_bytes describes them, address a multiple of 128 */
  int32_t reserved;
} peft_nvfp4_part;

typedef struct peft_nvfp4_gemm_args {
  uint32_t version; /* PEFT_NVFP4_ABI */
  int32_t instance; /* index into peft_nvfp4_describe */
  int32_t terms, parts;
  int64_t m, k;     /* k as stored: a multiple of 32 */
  const void* x_codes[PEFT_NVFP4_TERMS];  /* (m, k/2) bytes each, row-major, address a multiple of 16 */
  const void* x_scales[PEFT_NVFP4_TERMS]; /* (m, k/16) E4M3 bytes each, row-major; swizzled, one term right after the other, where
                                             x_scales_swizzled says so */
  const float* x_gscale;                  /* (m,), or (1,) for all rows */
  int64_t x_gscale_rows;                  /* m or 1 */
  peft_nvfp4_part part[PEFT_NVFP4_PARTS];
  void* workspace; /* on the device, address a multiple of 256; contents irrelevant */
  int64_t workspace_bytes;
  void* stream;     /* cudaStream_t */
  int32_t sm_count; /* multiprocessors to fill; 0 asks the current device */
  int32_t x_scales_swizzled; /* as scales_swizzled of a part */
} peft_nvfp4_gemm_args;

PEFT_NVFP4_API int peft_nvfp4_abi(void);
/* 0, or a code for peft_nvfp4_error. All products are queued on args->stream. */
PEFT_NVFP4_API int peft_nvfp4_gemm(const peft_nvfp4_gemm_args* args);
/* Bytes of workspace for these arguments (pointers are not looked at), or minus an error code. */
PEFT_NVFP4_API int64_t peft_nvfp4_workspace(const peft_nvfp4_gemm_args* args);
/* Bytes of swizzled scales of a matrix: tiles of 128 rows and 4 columns (64 values of k), of 512 bytes each, a row of tiles after the
 * other. Element (r, c) of a tile is its byte (r % 32) * 16 + (r / 32) * 4 + c. Bytes past the matrix are zero. */
PEFT_NVFP4_API int64_t peft_nvfp4_scale_bytes(int64_t rows, int64_t k);
/* What is wrong and the rule that it breaks; never null. */
PEFT_NVFP4_API const char* peft_nvfp4_error(int code);
/* One instance per call, "name tile_m tile_n tile_k schedule c d stages smem_bytes"; null past the last. */
PEFT_NVFP4_API const char* peft_nvfp4_describe(int instance);
/* What was built: "archs=12.0a,12.1a emulated=0 cutlass=4.2.0 nvcc=13.0 source=<hash>". */
PEFT_NVFP4_API const char* peft_nvfp4_build_info(void);

#ifdef __cplusplus
}
#endif
