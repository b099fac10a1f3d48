// Who touched a byte last, so that two accesses which nothing orders are recognised.
#pragma once
#include <cstdint>
#include <vector>

namespace sim {

struct Access {
  uint32_t time = 0;  // 0: never
  uint16_t thread = 0;
  bool atomic = false;
  int site = -1;
};

// One granule of memory. Of its readers the latest is kept, and one more that is not ordered before it.
struct Cell {
  Access write, read, read_too;
};

class Shadow {
 public:
  void reset(size_t bytes, int granule);
  // Granules that [offset, offset + size) touches; a smaller access than a granule refines the whole shadow.
  Cell* cells(size_t offset, size_t size, size_t& count);
  int granule() const { return granule_; }
  void clear();

 private:
  std::vector<Cell> cells_;
  size_t bytes_ = 0;
  int granule_ = 4;
};

}  // namespace sim
