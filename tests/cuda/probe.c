// What test_repeat.py launches in the place of a kernel: ((source, minuend or None, target), factor, spin) sets
// target = factor * source - minuend, of float32 numbers in a row.
#include <tvm/ffi/c_api.h>

static const DLTensor* tensor(const TVMFFIAny* any) {
  if (any->type_index == kTVMFFINone) return 0;
  return any->type_index == kTVMFFITensor ? (const DLTensor*)(any->v_obj + 1) : (const DLTensor*)any->v_ptr;
}

TVM_FFI_DLL_EXPORT int __tvm_ffi_probe(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  const TVMFFISeqCell* cell = (const TVMFFISeqCell*)(args[0].v_obj + 1);
  const TVMFFIAny* tensors = (const TVMFFIAny*)cell->data;
  const DLTensor *source = tensor(tensors), *minuend = tensor(tensors + 1), *target = tensor(tensors + 2);
  if (args[1].v_float64 < 0) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "the factor is negative");
    return -1;
  }
  int64_t size = 1;
  for (int i = 0; i < source->ndim; i++) size *= source->shape[i];
  for (volatile int64_t spin = 0; spin < args[2].v_int64; spin++) {
  }
  for (int64_t i = 0; i < size; i++) {
    const float taken = minuend ? ((const float*)minuend->data)[i] : 0;
    ((float*)target->data)[i] = (float)args[1].v_float64 * ((const float*)source->data)[i] - taken;
  }
  return 0;
}
