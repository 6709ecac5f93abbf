// Test only: ways to be wrong that the emulated library can be told to have, one at a time, to see that `peft-nvfp4 doctor` names them.
//
//   1  wrong swizzle      TMA writes the tiles of codes into shared memory in another order than ldmatrix expects
//   2  wrong lane         the scale of row g is taken from the lane of row g + 8
//   3  tile skipped       the last tile of columns is not written where an output has more than one
//   4  stale tensor map   a map is made once for each shape and used again for other addresses
//   5  dropped carry      the sum is cut off to BF16 after each instruction
//
// The library exports peft_nvfp4_set_fault(int) (emulated/faults.cu). Kernels read a constant that every source has for itself.
#pragma once
#include <cuda_runtime.h>

namespace peft_nvfp4 {

enum Fault : int { kNoFault = 0, kWrongSwizzle, kWrongLane, kTileSkipped, kStaleTensorMap, kDroppedCarry, kFaults };

struct FaultSwitch {  // one for each source file
  int (*set)(int);
  FaultSwitch* next;
};

inline FaultSwitch*& fault_switches() {
  static FaultSwitch* first = nullptr;
  return first;
}

inline int& host_fault() {
  static int fault = kNoFault;
  return fault;
}

static __constant__ int device_fault;

static int set_device_fault(int fault) { return int(cudaMemcpyToSymbol(device_fault, &fault, sizeof fault)); }

static FaultSwitch const* const registered_switch = [] {
  static FaultSwitch mine{&set_device_fault, fault_switches()};
  return fault_switches() = &mine;
}();

}  // namespace peft_nvfp4
