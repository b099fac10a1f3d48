// One tensor copy: where its box lies in global and in shared memory.
#pragma once
#include "async/async.h"
#include "async/tensormap.h"

namespace ptx {

// One row of the box along dimension 0: `memory` is where its first byte would be, of which [first, last) are inside
// the tensor (first == last: none).
struct BoxRow {
  uint8_t* memory;
  uint32_t first, last;
};

struct Box {
  TensorMap map;
  uint32_t width = 0;        // bytes of a row in global memory
  uint32_t pitch = 0;        // bytes from one row to the next in shared memory
  uint32_t chunk = 16;       // bytes that stay together in shared memory...
  uint32_t data = 16;        // ...of which so many are data: 8 of b4x16_p64, 12 of b6x16_p32
  std::vector<BoxRow> rows;
  uint64_t bytes() const { return uint64_t{width} * rows.size(); }             // what complete-tx counts
  uint64_t shared_bytes() const { return uint64_t{pitch} * rows.size(); }
};

// The box at `coordinates`: as many as dimensions, or {column, row, row, row, row} when `scattered`. Fails when the map
// is invalid, has another rank, or when part of it that is inside the tensor lies outside registered memory.
Box box_at(const Context&, const TensorMap&, const int32_t* coordinates, unsigned n, bool scattered, bool write);

void load_box(const Box&, SharedPlace);                         // global -> shared, filled outside the tensor
void gather_box(const Box&, SharedPlace, Buffer&);              // shared -> dense rows
void store_box(const Box&, const Buffer&);                      // dense rows -> global, nothing outside the tensor
void reduce_box(const Box&, const Buffer&, Reducer);
// For the checker: the shared and the global bytes of the box.
void tell_shared(Checker&, const AsyncRef&, const Box&, SharedPlace, bool write);
void tell_global(Checker&, const AsyncRef&, const Box&, bool write, bool reduction);

}  // namespace ptx
