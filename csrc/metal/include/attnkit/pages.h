// Caches in pages: where the keys of a sequence lie.

// The pages of a sequence, as its row of the block table names them. An entry that names no page is cut to one that
// does.
struct Pages {
  const device int* table;
  int keys;  // of a page
  int last;
};

// Where a key lies: a page, and its place there.
struct Place {
  int page;
  int slot;
};

inline Place place_of(thread const Pages& pages, int key) {
  Place place;
  place.page = clamp(pages.table[key / pages.keys], 0, pages.last);
  place.slot = key % pages.keys;
  return place;
}

// Of the place that ``lane`` has looked up, in elements. Called by a whole simdgroup.
inline long offset_of(thread const Place& place, int lane, long page_step, long key_step) {
  return simd_shuffle(place.page, ushort(lane)) * page_step + simd_shuffle(place.slot, ushort(lane)) * key_step;
}
