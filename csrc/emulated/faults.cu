// Test only, see faults.h.
#include "abi.h"
#include "emulated/faults.h"

// 0, or a CUDA error. Takes effect on the current device, for products launched from now on.
extern "C" PEFT_NVFP4_API int peft_nvfp4_set_fault(int fault) {
  if (fault < 0 || fault >= peft_nvfp4::kFaults) return int(cudaErrorInvalidValue);
  peft_nvfp4::host_fault() = fault;
  for (auto* one = peft_nvfp4::fault_switches(); one; one = one->next) {
    if (int error = one->set(fault)) return error;
  }
  return 0;
}
