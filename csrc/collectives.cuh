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
//   both terms beside one weight tile (saves the L2 read; 27.7 KB a stage, of which three fit; needs a loop of MMAs of our own).
// * A low-rank tail. LoRA's h @ up.T has the same accumulators: m16n8k16 of BF16 and m16n8k64 of FP4 place them alike. So it is the end
//   of the k loop, in BF16: a tile of TileK / 4 ranks has the bytes of a tile of codes and takes its place in shared memory. A tail tile
//   costs as much tensor core time as two to four tiles of codes (BF16 has an eighth of FP4's rate), and saves the product's own
//   launch, and M x N numbers written, read and rounded. The epilogue multiplies it by the global scales, too; prepare.cu divides h.
// * Parts. q, k, v (gate, up) multiply the same x by separate weights into separate outputs. Their tiles of columns are counted
//   through, and each tile looks up its part. One launch fills the card: at M = 2048 the 64 tiles of a (2048 x 512) product leave a
//   quarter of 84 SMs idle, those of q+k+v together take 5 waves instead of 4 + 1 + 1. Rejected: CUTLASS's grouped GEMM, which
//   rewrites TMA descriptors on the device for every group; all of ours are known when the kernel is launched.
#pragma once

namespace peft_nvfp4 {

using namespace cute;

constexpr int MaxTerms = PEFT_NVFP4_TERMS;
constexpr int MaxParts = PEFT_NVFP4_PARTS;

// Until the kernel before on the stream (prepare.cu) has ended and its writes are seen. At once where a launch does not overlap one.
// Only what that kernel writes is read after it: everything else was there before it began.
CUTLASS_DEVICE void wait_for_prepared() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

// The BF16 instruction with the accumulators and the warps of an FP4 one.
template <class Mma>
struct TailMmaOf;
template <class Atom, class Layout_, class Permutation>
struct TailMmaOf<TiledMMA<Atom, Layout_, Permutation>> {
  using type = TiledMMA<MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>, Layout_,
                        Tile<remove_cvref_t<decltype(get<0>(Permutation{}))>, remove_cvref_t<decltype(get<1>(Permutation{}))>, _16>>;
};

// h @ up.T of one part, BF16; rank 0: nothing. Pitches in elements.
struct LowRank {
  cutlass::bfloat16_t const* h = nullptr;   // (m, rank)
  cutlass::bfloat16_t const* up = nullptr;  // (n, rank)
  int64_t h_pitch = 0, up_pitch = 0;
  int rank = 0;
};

template <class Base_>
struct Mainloop : Base_ {
  using Base = Base_;
  using BF16 = cutlass::bfloat16_t;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileShape;
  using BaseParams = typename Base::Params;
  using ScaleConfig = typename Base::Sm1xxBlkScaledConfig;

  static constexpr int TileM = size<0>(TileShape{}), TileN = size<1>(TileShape{});
  // Scale factors come in tiles of 128 rows: a narrower tile of columns loads those of its neighbours, too.
  static constexpr int SharedSFB = TileN < 128 ? 128 / TileN : 1;
  using TileShapeSFB = Shape<Int<TileM>, Int<TileN * SharedSFB>, decltype(size<2>(TileShape{}))>;
  static constexpr int TailK = size<2>(TileShape{}) / 4;  // ranks in a tile of the tail
  using TailMma = typename TailMmaOf<typename Base::TiledMma>::type;
  using TailAtom = cute::conditional_t<TailK == 32, GMMA::Layout_K_SW64_Atom<BF16>, GMMA::Layout_K_SW128_Atom<BF16>>;
  using Stages = Int<Base::DispatchPolicy::Stages>;
  using SmemH = decltype(tile_to_shape(TailAtom{}, Shape<Int<TileM>, Int<TailK>, Stages>{}));
  using SmemUp = decltype(tile_to_shape(TailAtom{}, Shape<Int<TileN>, Int<TailK>, Stages>{}));
  static_assert(cosize_v<SmemH> * 16 == cosize_v<typename Base::SmemLayoutA> * 4, "a tail tile takes the place of a tile of codes");
  static_assert(cosize_v<SmemUp> * 16 == cosize_v<typename Base::SmemLayoutB> * 4, "a tail tile takes the place of a tile of codes");
  using TailStride = Stride<int64_t, _1, _0>;
  using TailTensor = decltype(make_tensor(static_cast<BF16 const*>(nullptr), repeat_like(TailStride{}, int32_t(0)), TailStride{}));
  using TmaH = decltype(make_tma_copy(SM90_TMA_LOAD{}, TailTensor{}, SmemH{}(_, _, _0{}), Shape<Int<TileM>, Int<TailK>>{}, _1{}));
  using TmaUp = decltype(make_tma_copy(SM90_TMA_LOAD{}, TailTensor{}, SmemUp{}(_, _, _0{}), Shape<Int<TileN>, Int<TailK>>{}, _1{}));

  struct Arguments {
    int m, k, terms;
    PartMap map;
    typename Base::ElementA const* a[MaxTerms];
    typename Base::ElementSF const* sfa;  // swizzled, term after term
    typename Base::ElementB const* b[MaxParts];
    typename Base::ElementSF const* sfb[MaxParts];  // swizzled
    LowRank low_rank[MaxParts];
  };

  struct Params {
    typename BaseParams::TMA_A a[MaxTerms];
    typename BaseParams::TMA_SFA sfa;
    typename BaseParams::TMA_B b[MaxParts];
    typename BaseParams::TMA_SFB sfb[MaxParts];
    typename Base::LayoutSFA layout_sfa;
    typename Base::LayoutSFB layout_sfb[MaxParts];
    TmaH h[MaxParts];
    TmaUp up[MaxParts];
    int rank[MaxParts];
    int largest_rank, tail;  // tiles at the end of the k loop
    int first_low_rank;      // a part that has one, where there is a tail
    PartMap map;
    int m, k, terms;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  static int largest_rank(Arguments const& args) {
    int largest = 0;
    for (int i = 0; i < args.map.parts; ++i) largest = args.low_rank[i].rank > largest ? args.low_rank[i].rank : largest;
    return largest;
  }

  static int tail_tiles(Arguments const& args) { return (largest_rank(args) + TailK - 1) / TailK; }

  static void describe_tail(Arguments const& args, Params& params) {
    params.largest_rank = largest_rank(args);
    params.tail = tail_tiles(args);
    params.first_low_rank = 0;
    for (int i = args.map.parts - 1; i >= 0; --i) {
      LowRank const& one = args.low_rank[i];
      if ((params.rank[i] = one.rank) == 0) continue;
      params.first_low_rank = i;
      Tensor h = make_tensor(one.h, make_shape(args.m, one.rank, 1), TailStride{one.h_pitch, {}, {}});
      Tensor up = make_tensor(one.up, make_shape(args.map.n[i], one.rank, 1), TailStride{one.up_pitch, {}, {}});
      params.h[i] = make_tma_copy(SM90_TMA_LOAD{}, h, SmemH{}(_, _, _0{}), Shape<Int<TileM>, Int<TailK>>{}, _1{});
      params.up[i] = make_tma_copy(SM90_TMA_LOAD{}, up, SmemUp{}(_, _, _0{}), Shape<Int<TileN>, Int<TailK>>{}, _1{});
    }
  }

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
    describe_tail(args, params);
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
      if (params.rank[i]) {
        prefetch_tma_descriptor(params.h[i].get_tma_descriptor());
        prefetch_tma_descriptor(params.up[i].get_tma_descriptor());
      }
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
      wait_for_prepared();  // scales, h
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
      Tensor gSFB = local_tile(mSFB, TileShapeSFB{}, make_coord(_, _, _), B{})(_, _, n / SharedSFB, _, 0);  // (BLK_N,BLK_K,k)

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
      tiles -= params.tail;
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

      // A part without a low-rank product reads another one's past its rank, where TMA fills in zeros. The scales' tiles come along
      // because the barrier waits for their bytes.
      int source = params.rank[part] ? part : params.first_low_rank;
      int skipped = params.rank[part] ? 0 : params.tail;
      auto const& tma_h = params.h[source];
      auto const& tma_up = params.up[source];
      Tensor mH = tma_h.get_tma_tensor(make_shape(params.m, params.largest_rank, 1));
      Tensor mUp = tma_up.get_tma_tensor(make_shape(params.map.n[source], params.largest_rank, 1));
      Tensor gH = local_tile(mH, Shape<Int<TileM>, Int<TailK>>{}, make_coord(m, _, 0));    // (BLK_M,TailK,k)
      Tensor gUp = local_tile(mUp, Shape<Int<TileN>, Int<TailK>>{}, make_coord(n, _, 0));  // (BLK_N,TailK,k)
      auto slice_h = tma_h.get_slice(0);
      auto slice_up = tma_up.get_slice(0);
      Tensor fromH = slice_h.partition_S(gH);
      Tensor toH = slice_h.partition_D(smem_h(storage));
      Tensor fromUp = slice_up.partition_S(gUp);
      Tensor toUp = slice_up.partition_D(smem_up(storage));
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = 0; tile < params.tail; ++tile) {
        pipeline.producer_acquire(write);
        auto* barrier = pipeline.producer_get_barrier(write);
        int stage = write.index();
        copy(tma_h.with(*barrier), fromH(_, _, _, tile + skipped), toH(_, _, _, stage));
        copy(tma_up.with(*barrier), fromUp(_, _, _, tile + skipped), toUp(_, _, _, stage));
        copy(params.sfa.with(*barrier), fromSFA(_, _, _, 0, 0), toSFA(_, _, _, stage));
        copy(tma_sfb.with(*barrier), fromSFB(_, _, _, 0), toSFB(_, _, _, stage));
        ++write;
      }
    }
    __syncwarp();
  }

  // CUTLASS from 4.5 on passes the tile's coordinates as well, and looks its scale factors up by that of the column: within its part.
  template <class Accumulators, class... Coord>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& accumulators, int tiles, int thread,
                          TensorStorage& storage, Params const& params, Coord const&... coord) {
    BaseParams unused{};
    int codes = tiles - params.tail;
    Base::mma(pipeline, read, accumulators, codes, thread, storage, unused, within_part(params, coord)...);
    read.advance(codes);
    mma_tail_tiles(pipeline, read, accumulators, thread, storage, params);
  }

 private:
  template <class Coord>
  CUTLASS_DEVICE static auto within_part(Params const& params, Coord const& coord) {
    int n = get<1>(coord);
    return make_coord(get<0>(coord), n - params.map.first_tile[params.map.find(n)], get<2>(coord), get<3>(coord));
  }

  CUTLASS_DEVICE static auto smem_h(TensorStorage& storage) {
    return make_tensor(make_smem_ptr(reinterpret_cast<BF16*>(&storage.smem_A)), SmemH{});
  }

  CUTLASS_DEVICE static auto smem_up(TensorStorage& storage) {
    return make_tensor(make_smem_ptr(reinterpret_cast<BF16*>(&storage.smem_B)), SmemUp{});
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void mma_tail_tiles(MainloopPipeline& pipeline, PipelineState& read, Accumulators& accumulators, int thread,
                                            TensorStorage& storage, Params const& params) {
    TailMma mma;
    auto slice = mma.get_thread_slice(thread);
    Tensor sH = smem_h(storage);
    Tensor sUp = smem_up(storage);
    Tensor rH = slice.partition_fragment_A(sH(_, _, _0{}));
    Tensor rUp = slice.partition_fragment_B(sUp(_, _, _0{}));
    auto copy_h = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, BF16>{}, mma);
    auto copy_up = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, BF16>{}, mma);
    Tensor fromH = copy_h.get_thread_slice(thread).partition_S(as_position_independent_swizzle_tensor(sH));
    Tensor fromUp = copy_up.get_thread_slice(thread).partition_S(as_position_independent_swizzle_tensor(sUp));
    Tensor toH = copy_h.get_thread_slice(thread).retile_D(rH);
    Tensor toUp = copy_up.get_thread_slice(thread).retile_D(rUp);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = 0; tile < params.tail; ++tile) {
      pipeline.consumer_wait(read);
      int stage = read.index();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(rH); ++k) {
        if (tile * TailK + k * 16 < params.largest_rank) {
          copy(copy_h, fromH(_, _, k, stage), toH(_, _, k));
          copy(copy_up, fromUp(_, _, k, stage), toUp(_, _, k));
          cute::gemm(mma, rH(_, _, k), rUp(_, _, k), accumulators);
        }
      }
      cutlass::arch::NamedBarrier::sync(thr_size(mma), cutlass::arch::ReservedNamedBarriers::Sm120MainloopBarrier);
      pipeline.consumer_release(read);
      ++read;
    }
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
    wait_for_prepared();  // biases
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
