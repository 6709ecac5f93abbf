// Two collectives around CUTLASS's own, which let one launch do more than one product of the same x.
//
// A CUTLASS GEMM is a kernel (tile loop, warp roles, barriers) over a mainloop (loads and MMA) and an epilogue (registers to memory).
// Here the kernel, the MMA half of the mainloop and the body of the epilogue are CUTLASS's, untouched. What is replaced is where
// tiles are loaded from and stored to:
//
// * Terms. x may be x_1 + x_2, both in FP4 with the same row scale. The k loop runs over k tiles and, inside, over terms; the weight's
//   tile is asked for again (it is still in L2). That is the GEMM of doubled K without a copy of anything: only the one thread that
//   issues TMA loads knows of it, so registers, shared memory and MMA code are those of the plain product. Rejected: a second launch
//   that accumulates (reads and writes y once more: M*N*4 bytes, as much as all of the operands at K = 2048); a stage that holds
//   both terms beside one weight tile (saves the L2 read, costs a third more shared memory a stage, hence a stage).
// * Parts. q, k, v (gate, up) multiply the same x by separate weights into separate outputs. Their tiles of columns are counted
//   through, and each tile looks up its part. One launch fills the card: at M = 2048 the 64 tiles of a (2048 x 512) product leave a
//   quarter of 84 SMs idle, those of q+k+v together take 5 waves instead of 4 + 1 + 1. Rejected: CUTLASS's grouped GEMM, which
//   rewrites TMA descriptors on the device for every group; all of ours are known when the kernel is launched.
#pragma once

namespace peft_nvfp4 {

using namespace cute;

constexpr int MaxTerms = PEFT_NVFP4_TERMS;
constexpr int MaxParts = PEFT_NVFP4_PARTS;

// Which part a tile of columns belongs to.
struct PartMap {
  int parts = 1;
  int n[MaxParts] = {};
  int first_tile[MaxParts] = {};

  CUTLASS_HOST_DEVICE int find(int tile) const {
    int part = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < MaxParts; ++i) {
      part = (i < parts && tile >= first_tile[i]) ? i : part;
    }
    return part;
  }

  // Returns the number of tiles of all parts.
  int fill(int count, int const* columns, int tile_n) {
    parts = count;
    int tiles = 0;
    for (int i = 0; i < count; ++i) {
      n[i] = columns[i];
      first_tile[i] = tiles;
      tiles += (columns[i] + tile_n - 1) / tile_n;
    }
    return tiles;
  }
};

template <class Base_>
struct Mainloop : Base_ {
  using Base = Base_;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileShape;
  using BaseParams = typename Base::Params;
  using ScaleConfig = typename Base::Sm1xxBlkScaledConfig;

  struct Arguments {
    int m, k, terms;
    PartMap map;
    typename Base::ElementA const* a[MaxTerms];
    typename Base::ElementSF const* sfa;  // swizzled, term after term
    typename Base::ElementB const* b[MaxParts];
    typename Base::ElementSF const* sfb[MaxParts];  // swizzled
  };

  struct Params {
    typename BaseParams::TMA_A a[MaxTerms];
    typename BaseParams::TMA_SFA sfa;
    typename BaseParams::TMA_B b[MaxParts];
    typename BaseParams::TMA_SFB sfb[MaxParts];
    typename Base::LayoutSFA layout_sfa;
    typename Base::LayoutSFB layout_sfb[MaxParts];
    PartMap map;
    int m, k, terms;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    Params params;
    params.map = args.map;
    params.m = args.m;
    params.k = args.k;
    params.terms = args.terms;
    auto stride = cutlass::make_cute_packed_stride(typename Base::StrideA{}, make_shape(args.m, args.k, 1));
    params.layout_sfa = ScaleConfig::tile_atom_to_shape_SFA(make_shape(args.m, 1, args.k, args.terms));
    for (int i = 0; i < (args.terms > args.map.parts ? args.terms : args.map.parts); ++i) {
      int part = i < args.map.parts ? i : 0, term = i < args.terms ? i : 0;
      auto shape = make_shape(args.m, args.map.n[part], args.k, 1);
      auto layout_sfb = ScaleConfig::tile_atom_to_shape_SFB(shape);
      typename Base::Arguments one{args.a[term], stride, args.b[part], stride, args.sfa, params.layout_sfa, args.sfb[part], layout_sfb};
      BaseParams built = Base::to_underlying_arguments(shape, one, nullptr);
      params.sfa = built.tma_load_sfa;
      params.a[term] = built.tma_load_a;
      params.b[part] = built.tma_load_b;
      params.sfb[part] = built.tma_load_sfb;
      params.layout_sfb[part] = layout_sfb;
    }
    return params;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;  // entry.cu has checked
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    for (int i = 0; i < params.terms; ++i) prefetch_tma_descriptor(params.a[i].get_tma_descriptor());
    prefetch_tma_descriptor(params.sfa.get_tma_descriptor());
    for (int i = 0; i < params.map.parts; ++i) {
      prefetch_tma_descriptor(params.b[i].get_tma_descriptor());
      prefetch_tma_descriptor(params.sfb[i].get_tma_descriptor());
    }
  }

  // The kernel takes the numbers of tiles from these two: of rows, of all parts' columns, and of k times terms.
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem, Params const& params) const {
    auto [M, N, K, L] = problem;
    Tensor a = params.a[0].get_tma_tensor(make_shape(M, K, L));
    Tensor b = params.b[0].get_tma_tensor(make_shape(N, K, L));
    return cute::make_tuple(local_tile(a, TileShape{}, make_coord(_, _, _), Step<_1, Underscore, _1>{}),   // (BLK_M,BLK_K,m,k,l)
                            local_tile(b, TileShape{}, make_coord(_, _, _), Step<Underscore, _1, _1>{}));  // (BLK_N,BLK_K,n,k,l)
  }

  template <class LoadInputs, class BlockCoord, class KTileIterator>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write, LoadInputs const&,
                           BlockCoord const& coord, KTileIterator, int tiles, int, uint32_t, TensorStorage& storage) {
    if (cute::elect_one_sync()) {
      int m = get<0>(coord);
      int part = params.map.find(get<1>(coord));
      int n = get<1>(coord) - params.map.first_tile[part];
      auto const& tma_b = params.b[part];
      auto const& tma_sfb = params.sfb[part];

      Tensor mA = params.a[0].get_tma_tensor(make_shape(params.m, params.k, 1));
      Tensor mB = tma_b.get_tma_tensor(make_shape(params.map.n[part], params.k, 1));
      Tensor mSFA = params.sfa.get_tma_tensor(shape(params.layout_sfa));
      Tensor mSFB = tma_sfb.get_tma_tensor(shape(params.layout_sfb[part]));
      using A = Step<_1, Underscore, _1>;
      using B = Step<Underscore, _1, _1>;
      Tensor gA = local_tile(mA, TileShape{}, make_coord(_, _, _), A{})(_, _, m, _, 0);      // (BLK_M,BLK_K,k)
      Tensor gB = local_tile(mB, TileShape{}, make_coord(_, _, _), B{})(_, _, n, _, 0);      // (BLK_N,BLK_K,k)
      Tensor gSFA = local_tile(mSFA, TileShape{}, make_coord(_, _, _), A{})(_, _, m, _, _);  // (BLK_M,BLK_K,k,term)
      Tensor gSFB = local_tile(mSFB, TileShape{}, make_coord(_, _, _), B{})(_, _, n, _, 0);  // (BLK_N,BLK_K,k)

      Tensor sA = make_tensor(make_smem_ptr(storage.smem_A.begin()), typename Base::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
      Tensor sB = make_tensor(make_smem_ptr(storage.smem_B.begin()), typename Base::SmemLayoutB{});
      Tensor sSFA = make_tensor(make_smem_ptr(storage.smem_SFA.begin()), typename Base::SmemLayoutSFA{});
      Tensor sSFB = make_tensor(make_smem_ptr(storage.smem_SFB.begin()), typename Base::SmemLayoutSFB{});
      auto slice_a = params.a[0].get_slice(0);
      auto slice_b = tma_b.get_slice(0);
      auto slice_sfa = params.sfa.get_slice(0);
      auto slice_sfb = tma_sfb.get_slice(0);
      Tensor fromA = slice_a.partition_S(gA);
      Tensor toA = slice_a.partition_D(sA);
      Tensor fromB = slice_b.partition_S(gB);
      Tensor toB = slice_b.partition_D(sB);
      Tensor fromSFA = slice_sfa.partition_S(gSFA);
      Tensor toSFA = slice_sfa.partition_D(sSFA);
      Tensor fromSFB = slice_sfb.partition_S(gSFB);
      Tensor toSFB = slice_sfb.partition_D(sSFB);

      int k = 0, term = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; tiles > 0; --tiles) {
        pipeline.producer_acquire(write);
        auto* barrier = pipeline.producer_get_barrier(write);
        int stage = write.index();
        copy(params.a[term].with(*barrier), fromA(_, _, _, k), toA(_, _, _, stage));
        copy(tma_b.with(*barrier), fromB(_, _, _, k), toB(_, _, _, stage));
        copy(params.sfa.with(*barrier), fromSFA(_, _, _, k, term), toSFA(_, _, _, stage));
        copy(tma_sfb.with(*barrier), fromSFB(_, _, _, k), toSFB(_, _, _, stage));
        ++write;
        if (++term == params.terms) {
          term = 0;
          ++k;
        }
      }
    }
    __syncwarp();
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& accumulators, int tiles, int thread,
                          TensorStorage& storage, Params const&) {
    BaseParams unused{};
    Base::mma(pipeline, read, accumulators, tiles, thread, storage, unused);
  }
};

template <class Base_>
struct Epilogue : Base_ {
  using Base = Base_;
  using typename Base::LoadPipeline;
  using typename Base::LoadPipelineState;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using typename Base::TensorStorage;
  static constexpr bool ReuseSmemC = Base::DispatchPolicy::ReuseSmemC;

  struct Arguments {
    int m;
    PartMap map;
    typename Base::Arguments part[MaxParts];
  };

  struct Params {
    typename Base::Params part[MaxParts];
    PartMap map;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    Params params;
    params.map = args.map;
    for (int i = 0; i < args.map.parts; ++i) {
      params.part[i] = Base::to_underlying_arguments(make_shape(args.m, args.map.n[i], 1, 1), args.part[i], nullptr);
    }
    return params;
  }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    for (int i = 0; i < params.map.parts; ++i) Base::prefetch_tma_descriptors(params.part[i]);
  }

  CUTLASS_HOST_DEVICE Epilogue(Params const& params_, TensorStorage& storage) : Base(params_.part[0], storage), params(params_) {}

  template <class Problem, class TileShape, class Coord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, Problem problem, TileShape tile, Coord coord, TiledMma mma,
                           int thread, TensorStorage& storage, int subtile = -1) {
    int i = params.map.find(get<1>(coord));
    Base part(params.part[i], storage);
    return part.load(pipeline, state, shape(problem, i), tile, local(coord, i), mma, thread, storage, subtile);
  }

  template <class Problem, class TileShape, class Coord, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                            StorePipelineState store_state, Problem problem, TileShape tile, Coord coord,
                            cute::Tensor<Engine, Layout> accumulators, TiledMma mma, int thread, TensorStorage& storage,
                            int subtile = -1) {
    int i = params.map.find(get<1>(coord));
    Base part(params.part[i], storage);
    auto states = part.store(load_pipeline, load_state, store_pipeline, store_state, shape(problem, i), tile, local(coord, i),
                             accumulators, mma, thread, storage, subtile);
    // Where C and D share buffers, CUTLASS hands a buffer back to the loader one store later and counts stores across tiles.
    // `part` ends with the tile, so what it still holds is handed back here; otherwise the loader starves after three tiles.
    if constexpr (ReuseSmemC) {
      return part.store_tail(load_pipeline, get<0>(states), store_pipeline, get<1>(states));
    } else {
      return states;
    }
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                                 StorePipelineState store_state) {
    store_pipeline.producer_tail(store_state);
    return cute::make_tuple(load_state, store_state);
  }

 private:
  template <class Problem>
  CUTLASS_DEVICE auto shape(Problem const& problem, int i) const {
    return make_shape(get<0>(problem), params.map.n[i], get<2>(problem), get<3>(problem));
  }

  template <class Coord>
  CUTLASS_DEVICE auto local(Coord const& coord, int i) const {
    return make_coord(get<0>(coord), get<1>(coord) - params.map.first_tile[i], get<2>(coord), get<3>(coord));
  }

  Params const& params;
};

}  // namespace peft_nvfp4
