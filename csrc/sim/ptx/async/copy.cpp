// cp, st.async, red.async, tensormap and multimem: which unit has the form.
#include <algorithm>

#include "async/async.h"

namespace ptx {

void decode_copy(Decoder& d, Op& op) {
  const auto& parts = d.from.parts;
  const auto has = [&](const char* name) { return std::find(parts.begin(), parts.end(), name) != parts.end(); };
  if (parts[0] == "multimem") d.fail("multimem addresses belong to several GPUs, and one is simulated");
  if (parts[0] == "tensormap") return decode_tensormap(d, op);
  if (parts[0] == "st") return decode_store_async(d, op);
  if (parts[0] == "red") return decode_reduce_async(d, op);
  if (!has("async")) d.fail("cp without .async");
  if (!has("bulk")) return decode_cp_async(d, op);
  if (has("commit_group") || has("wait_group")) return decode_bulk_group(d, op);
  if (has("tensor")) return decode_tma(d, op);
  decode_bulk(d, op);
}

}  // namespace ptx
