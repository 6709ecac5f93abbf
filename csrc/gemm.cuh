// One instance of the GEMM: a tile, a schedule and the element types of c and d. csrc/generate.py writes a .cu file per instance.
//
// The epilogue as a visitor tree, in FP32 until the one rounding:  d = fma(x_gscale[m], w_gscale * acc, bias[n]) + c[m, n]
// x_gscale is a vector, or one value with stride 0; a null bias counts as zeros. A low-rank product (LoRA-up) inside the tree is not
// possible: a visitor sees one fragment of the accumulator and has neither MMA nor a pipeline of its own; it is part of acc instead
// (collectives.cuh).
#pragma once
#include "abi.h"
#include "tensor_map.h"
#ifdef PEFT_NVFP4_EMULATED
#include "emulated/emulated.cuh"
#endif

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

#include "collectives.cuh"
#include "instance.h"

namespace peft_nvfp4 {

template <class TileShape, class C>
struct Tree {
  using Multiply = cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>;
  using MultiplyAdd = cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, float, float,
                                                             cutlass::FloatRoundStyle::round_to_nearest>;
  using Plus = cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, float, float, cutlass::FloatRoundStyle::round_to_nearest>;
  using WeightScale = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float>;
  using RowScale = cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float, float, Stride<bool, _0, int64_t>, 1>;
  using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float, float>;
  using Scaled = cutlass::epilogue::fusion::Sm90EVT<Multiply, WeightScale, cutlass::epilogue::fusion::Sm90AccFetch>;
  using Product = cutlass::epilogue::fusion::Sm90EVT<MultiplyAdd, RowScale, Scaled, Bias>;
  using WithC = cutlass::epilogue::fusion::Sm90EVT<Plus, Product, cutlass::epilogue::fusion::Sm90SrcFetch<C>>;
  using Type = cute::conditional_t<cute::is_void_v<C>, Product, WithC>;

  static typename Product::Arguments product(float const* row, bool per_row, float const* weight, float const* bias) {
    typename RowScale::Arguments rows{row, 0.f, {per_row, _0{}, 0}};
    typename WeightScale::Arguments scale{{1.f}, {weight}};
    typename Bias::Arguments columns{bias, 0.f, {}};
    return {rows, {scale, {}, {}}, columns, {}};  // children, then the node itself
  }

  static typename Type::Arguments arguments(float const* row, bool per_row, float const* weight, float const* bias) {
    if constexpr (cute::is_void_v<C>) {
      return product(row, per_row, weight, bias);
    } else {
      return {product(row, per_row, weight, bias), {}, {}};
    }
  }
};

// What CUTLASS's device adapter does, but that keeps the CUDA error to itself. `overlapping`: begins while the kernel before it on the
// stream still runs (wait_for_prepared).
template <class GemmKernel>
int launch(typename GemmKernel::Params const& params, cudaStream_t stream, bool overlapping) {
  constexpr int bytes = GemmKernel::SharedStorageSize;
  if (cudaError_t error = cudaFuncSetAttribute(cutlass::device_kernel<GemmKernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    cudaGetLastError();
    return kAttribute + int(error);
  }
  void* arguments[] = {const_cast<typename GemmKernel::Params*>(&params)};
  auto kernel = reinterpret_cast<void const*>(&cutlass::device_kernel<GemmKernel>);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{GemmKernel::get_grid_shape(params), GemmKernel::get_block_shape(), size_t(bytes), stream, &attribute,
                            overlapping ? 1u : 0u};
  cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess ? kSuccess : kLaunch + int(error);
}

using Arch = cutlass::arch::Sm120;
using OpClass = cutlass::arch::OpClassBlockScaledTensorOp;
using Pair = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Cluster = Shape<_1, _1, _1>;  // SM120 has no multicast
using AutoTile = cutlass::epilogue::collective::EpilogueTileAuto;
template <class T>
constexpr int Align = 16 / int(sizeof(T));
// Static: the same tiles in the same order on every GPU, so what was checked on Hopper is what runs on SM120; the default scheduler asks
// the hardware for its next tile, which pays where tiles differ in length. Ours do not.
using Scheduler = cutlass::gemm::StaticPersistentScheduler;

// Calls one kernel. The kernel's type must be spelled out of any template (generate.py does): inside one, nvcc and the host compiler
// disagree on the type of a constant deep in CUTLASS's layouts (16 or 16u), and the kernel that is launched is not the one that was
// registered ("invalid device function"). See also NVIDIA/cutlass issue 2478.
template <class Kernel_, class C, class D>
struct Runner {
  using Kernel = Kernel_;
  using CollectiveMainloop = typename Kernel::CollectiveMainloop;
  using CollectiveEpilogue = typename Kernel::CollectiveEpilogue;
  using TileShape = typename Kernel::TileShape;
  using VisitorTree = Tree<TileShape, C>;
  static_assert(Kernel::SharedStorageSize <= cutlass::arch::sm120_smem_capacity_bytes, "more shared memory than an SM120 block may have");

  static constexpr int tile_k = size<2>(TileShape{});

  static int run(peft_nvfp4_gemm_args const& args, Prepared const& prepared) {
    using Code = cutlass::float_e2m1_t;
    using Scale = cutlass::float_ue4m3_t;
    int n[MaxParts] = {};
    for (int i = 0; i < args.parts; ++i) n[i] = int(args.part[i].n);
    PartMap map;
    int tiles = map.fill(args.parts, n, size<1>(TileShape{}));
    int m = int(args.m), k = int(args.k);

    typename CollectiveMainloop::Arguments loads{};
    loads.m = m, loads.k = k, loads.terms = args.terms, loads.map = map;
    loads.sfa = static_cast<Scale const*>(prepared.x_scales);
    for (int i = 0; i < args.terms; ++i) loads.a[i] = static_cast<Code const*>(prepared.x_codes[i]);

    typename CollectiveEpilogue::Arguments stores{};
    stores.m = m, stores.map = map;
    for (int i = 0; i < args.parts; ++i) {
      auto const& part = args.part[i];
      loads.b[i] = static_cast<Code const*>(prepared.w_codes[i]);
      loads.sfb[i] = static_cast<Scale const*>(prepared.w_scales[i]);
      loads.low_rank[i] = {static_cast<cutlass::bfloat16_t const*>(prepared.h[i]), static_cast<cutlass::bfloat16_t const*>(part.up),
                           hidden_pitch(part.rank), part.ldup, part.rank};
      auto& out = stores.part[i];
      out.thread = VisitorTree::arguments(args.x_gscale, args.x_gscale_rows > 1, part.gscale, prepared.bias[i]);
      out.ptr_C = static_cast<C const*>(part.c);
      out.ptr_D = static_cast<D*>(part.d);
      get<0>(out.dC) = part.ldc;
      get<0>(out.dD) = part.ldd;
    }
    int k_tiles = args.terms * ((k + tile_k - 1) / tile_k) + CollectiveMainloop::tail_tiles(loads);
    cutlass::KernelHardwareInfo hardware;
    hardware.sm_count = args.sm_count;
    tensor_map_error() = 0;
    typename Kernel::Params params = Kernel::to_underlying_arguments(
        {cutlass::gemm::GemmUniversalMode::kGemm, {m, tiles * int(size<1>(TileShape{})), k_tiles * tile_k, 1}, loads, stores, hardware, {}},
        nullptr);
    if (tensor_map_error()) return kTensorMap + tensor_map_error();
    return launch<Kernel>(params, static_cast<cudaStream_t>(args.stream), prepared.launched);
  }

  static Instance instance(char const* name, char const* text) {
    return {name, text, tile_k, int(CollectiveMainloop::DispatchPolicy::Stages), int(Kernel::SharedStorageSize),
            cute::is_void_v<C> ? 0 : int(sizeof(D)), int(sizeof(D)), &run};
  }
};

}  // namespace peft_nvfp4
