// Operations between the lanes of a warp: shfl vote match redux elect activemask (PTX ISA 9.7.9.6, 9.7.13.9 to .14).
//
// The scheduler brings the members of every executing lane together before the handler runs.
#include <algorithm>

#include "units/float_types.h"

namespace ptx {

namespace {

// Calls f(group) for the lanes that name the same members; fails when a lane is not among its own.
template <class F>
void groups(Context& c, const Op& op, F f) {
  const uint32_t* members = c.warp.v32(op.members).x;
  for (Mask left = c.mask; left != 0;) {
    const Mask wanted = members[__builtin_ctz(left)];
    Mask group = 0;
    for (Mask m = left; m != 0; m &= m - 1)
      if (members[__builtin_ctz(m)] == wanted) group |= m & -m;
    if ((group & ~wanted) != 0) {
      char text[96];
      snprintf(text, sizeof text, "lanes %#x execute this, the member mask is %#x", group, wanted);
      c.fail(text);
    }
    left &= ~group;
    f(group);
  }
}

enum Mode : uint8_t { kUp, kDown, kButterfly, kIndex };

template <uint8_t mode>
PTX_CLONES Step shuffle(Context& c, const Op& op) {
  uint32_t a[kLanes], from[kLanes], ok[kLanes];
  const uint32_t *value = c.warp.v32(op.s[0]).x, *b = c.warp.v32(op.s[1]).x, *e = c.warp.v32(op.s[2]).x;
  PTX_INDEPENDENT
  for (int l = 0; l < static_cast<int>(kLanes); l++) {
    const int bval = static_cast<int>(b[l] & 31), cval = static_cast<int>(e[l] & 31),
              segment = static_cast<int>(e[l] >> 8 & 31);
    const int most = (l & segment) | (cval & ~segment), least = l & segment;
    const int j = mode == kUp          ? l - bval
                  : mode == kDown      ? l + bval
                  : mode == kButterfly ? l ^ bval
                                       : least | (bval & ~segment);
    const bool in = mode == kUp ? j >= most : j <= most;
    a[l] = value[l];
    ok[l] = in;
    from[l] = static_cast<uint32_t>(in ? j : l);
  }
  const uint32_t* members = c.warp.v32(op.members).x;
  uint32_t named = kAll;
  for (unsigned l = 0; l < kLanes; l++) named &= members[l];
  if (named != kAll) groups(c, op, [](Mask) {});
  // A value of a lane that does not take part is undefined: say so instead of inventing one.
  for (Mask left = c.mask == kAll ? 0 : c.mask; left != 0; left &= left - 1) {
    const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
    if ((c.mask >> from[l] & 1) == 0 && (c.warp.live >> from[l] & 1) != 0)
      c.fail("lane " + std::to_string(l) + " reads lane " + std::to_string(from[l]) + ", which does not take part");
  }
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [&](unsigned l) { return a[from[l]]; });
  if (op.count != 0) each_bit(c.mask, c.warp.pred(op.d[1]), [&](unsigned l) { return ok[l] != 0; });
  return Step::next;
}

void decode_shuffle(Decoder& d, Op& op, Modifiers& m) {
  const std::string mode = m.take_one({"up", "down", "bfly", "idx"});
  m.take_one({"b32"});
  m.done();
  d.count(5, 5);
  const Operand& to = d.operand(0);
  op.d[0] = d.destination(to.kind == Operand::pair ? to.parts[0] : to, 4);
  if (to.kind == Operand::pair) {
    op.d[1] = d.destination(to.parts[1], 0);
    op.count = 1;
  }
  for (size_t i = 0; i < 3; i++) op.s[i] = d.source(d.operand(i + 1), 4);
  op.members = d.source(d.operand(4), 4);
  op.run = mode == "up"     ? shuffle<kUp>
           : mode == "down" ? shuffle<kDown>
           : mode == "bfly" ? shuffle<kButterfly>
                            : shuffle<kIndex>;
}

enum Vote : uint8_t { kEvery, kSome, kUniform, kBallot };

Step vote(Context& c, const Op& op) {
  const Mask p = op.size ? ~c.warp.pred(op.s[0]) : c.warp.pred(op.s[0]);
  groups(c, op, [&](Mask group) {
    const Mask yes = p & group;
    if (op.mode == kBallot) {
      each_lane(group, c.warp.v32(op.d[0]).x, [=](unsigned) { return yes; });
      return;
    }
    const bool result = op.mode == kEvery ? yes == group : op.mode == kSome ? yes != 0 : yes == 0 || yes == group;
    Mask& d = c.warp.pred(op.d[0]);
    d = result ? d | group : d & ~group;
  });
  return Step::next;
}

void decode_vote(Decoder& d, Op& op, Modifiers& m) {
  const std::string mode = m.take_one({"all", "any", "uni", "ballot"});
  m.take_one({mode == "ballot" ? "b32" : "pred"});
  m.done();
  d.count(3, 3);
  bool negated = false;
  op.d[0] = d.destination(d.operand(0), mode == "ballot" ? 4 : 0);
  op.s[0] = d.predicate(d.operand(1), negated);
  op.size = negated;
  op.mode = mode == "all" ? kEvery : mode == "any" ? kSome : mode == "uni" ? kUniform : kBallot;
  op.members = d.source(d.operand(2), 4);
  op.run = vote;
}

template <class T>
Step match(Context& c, const Op& op) {
  const T* a = LanesOf<T>::of(c.warp, op.s[0]);
  uint32_t* d = c.warp.v32(op.d[0]).x;
  uint32_t out[kLanes];
  Mask agreed = 0;
  groups(c, op, [&](Mask group) {
    for (Mask left = group; left != 0; left &= left - 1) {
      const unsigned l = static_cast<unsigned>(__builtin_ctz(left));
      out[l] = 0;
      for (Mask m = group; m != 0; m &= m - 1)
        if (a[__builtin_ctz(m)] == a[l]) out[l] |= m & -m;
      if (out[l] == group) agreed |= 1u << l;
      else if (op.mode != 0) out[l] = 0;
    }
  });
  each_lane(c.mask, d, [&](unsigned l) { return out[l]; });
  if (op.count != 0) {
    Mask& p = c.warp.pred(op.d[1]);
    p = (p & ~c.mask) | agreed;
  }
  return Step::next;
}

void decode_match(Decoder& d, Op& op, Modifiers& m) {
  op.mode = m.take_one({"any", "all"}) == "all";
  const bool wide = m.take_one({"b32", "b64"}) == "b64";
  m.done();
  d.count(3, 3);
  const Operand& to = d.operand(0);
  if (to.kind == Operand::pair) {
    if (op.mode == 0) d.fail("'d|p' goes with '.all'");
    op.d[1] = d.destination(to.parts[1], 0);
    op.count = 1;
  }
  op.d[0] = d.destination(to.kind == Operand::pair ? to.parts[0] : to, 4);
  op.s[0] = d.source(d.operand(1), wide ? 8 : 4);
  op.members = d.source(d.operand(2), 4);
  op.run = wide ? match<uint64_t> : match<uint32_t>;
}

template <class T, class F>
Step reduce(Context& c, const Op& op) {
  const uint32_t* a = c.warp.v32(op.s[0]).x;
  uint32_t out[kLanes];
  groups(c, op, [&](Mask group) {
    T sum = static_cast<T>(a[__builtin_ctz(group)]);
    for (Mask left = group & (group - 1); left != 0; left &= left - 1)
      sum = F::of(sum, static_cast<T>(a[__builtin_ctz(left)]));
    for (Mask left = group; left != 0; left &= left - 1) out[__builtin_ctz(left)] = static_cast<uint32_t>(sum);
  });
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [&](unsigned l) { return out[l]; });
  return Step::next;
}
struct Sum {
  template <class T>
  static T of(T a, T b) {
    return a + b;
  }
};
struct Least {
  template <class T>
  static T of(T a, T b) {
    return b < a ? b : a;
  }
};
struct Most {
  template <class T>
  static T of(T a, T b) {
    return a < b ? b : a;
  }
};
struct Both {
  template <class T>
  static T of(T a, T b) {
    return a & b;
  }
};
struct Either {
  template <class T>
  static T of(T a, T b) {
    return a | b;
  }
};
struct Differ {
  template <class T>
  static T of(T a, T b) {
    return a ^ b;
  }
};

enum : uint8_t { kMax = 1, kAbs = 2, kNan = 4 };

// Floats in the order of their values with -0 below +0: as integers whose magnitude bits are flipped when negative.
Step reduce_float(Context& c, const Op& op) {
  const uint32_t* a = c.warp.v32(op.s[0]).x;
  uint32_t out[kLanes];
  groups(c, op, [&](Mask group) {
    bool any = false, nan = false;
    int32_t best = 0;
    for (Mask left = group; left != 0; left &= left - 1) {
      const uint32_t bits = a[__builtin_ctz(left)] & (op.mode & kAbs ? 0x7fffffffu : kAll);
      if ((bits & 0x7fffffffu) > 0x7f800000u) {
        nan = true;
        continue;
      }
      const int32_t key = static_cast<int32_t>(bits ^ (bits >> 31 ? 0x7fffffffu : 0));
      best = !any ? key : op.mode & kMax ? std::max(best, key) : std::min(best, key);
      any = true;
    }
    const uint32_t bits = static_cast<uint32_t>(best) ^ (best < 0 ? 0x7fffffffu : 0);
    for (Mask left = group; left != 0; left &= left - 1)
      out[__builtin_ctz(left)] = !any || (nan && op.mode & kNan) ? 0x7fffffffu : bits;
  });
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [&](unsigned l) { return out[l]; });
  return Step::next;
}

void decode_redux(Decoder& d, Op& op, Modifiers& m) {
  const std::string what = m.take_one({"add", "min", "max", "and", "or", "xor"});
  const bool absolute = m.take("abs"), nan = m.take("NaN");
  const std::string type = m.take_one({"u32", "s32", "b32", "f32"});
  m.done();
  d.count(3, 3);
  op.d[0] = d.destination(d.operand(0), 4);
  op.s[0] = d.source(d.operand(1), 4);
  op.members = d.source(d.operand(2), 4);
  const bool arithmetic = what == "add" || what == "min" || what == "max";
  if ((absolute || nan) && type != "f32") d.fail("'.abs' and '.NaN' are for .f32");
  if (type == "f32") {
    if (what != "min" && what != "max") d.fail("'." + what + "' is not for .f32");
    op.mode = static_cast<uint8_t>((what == "max" ? kMax : 0) | (absolute ? kAbs : 0) | (nan ? kNan : 0));
    op.run = reduce_float;
  } else if (arithmetic != (type != "b32")) {
    d.fail("'." + what + "' is not for ." + type);
  } else if (what == "add") op.run = reduce<uint32_t, Sum>;
  else if (what == "min") op.run = type == "u32" ? reduce<uint32_t, Least> : reduce<int32_t, Least>;
  else if (what == "max") op.run = type == "u32" ? reduce<uint32_t, Most> : reduce<int32_t, Most>;
  else
    op.run = what == "and"  ? reduce<uint32_t, Both>
             : what == "or" ? reduce<uint32_t, Either>
                            : reduce<uint32_t, Differ>;
}

Step elect(Context& c, const Op& op) {
  groups(c, op, [&](Mask group) {
    const uint32_t leader = static_cast<uint32_t>(__builtin_ctz(group));
    each_lane(group, c.warp.v32(op.d[0]).x, [=](unsigned) { return leader; });
    Mask& p = c.warp.pred(op.d[1]);
    p = (p & ~group) | 1u << leader;
  });
  return Step::next;
}

void decode_elect(Decoder& d, Op& op, Modifiers& m) {
  m.done();
  d.count(2, 2);
  const Operand& to = d.operand(0);
  if (to.kind != Operand::pair) d.fail("'d|p' is expected");
  op.d[0] = d.destination(to.parts[0], 4);
  op.d[1] = d.destination(to.parts[1], 0);
  op.members = d.source(d.operand(1), 4);
  op.run = elect;
}

Step activemask(Context& c, const Op& op) {
  const Mask active = c.mask;
  each_lane(c.mask, c.warp.v32(op.d[0]).x, [=](unsigned) { return active; });
  return Step::next;
}

}  // namespace

void decode_collective(Decoder& d, Op& op) {
  const std::string& root = d.from.parts[0];
  op.kind = Class::integer;
  Modifiers m(d.from);
  if (root == "activemask") {
    m.take_one({"b32"});
    m.done();
    d.count(1, 1);
    op.d[0] = d.destination(d.operand(0), 4);
    op.run = activemask;
    return;
  }
  m.take_one({"sync"});  // the forms without it left PTX with sm_70
  op.collective = true;
  if (root == "shfl") decode_shuffle(d, op, m);
  else if (root == "vote") decode_vote(d, op, m);
  else if (root == "match") decode_match(d, op, m);
  else if (root == "redux") decode_redux(d, op, m);
  else decode_elect(d, op, m);
}

}  // namespace ptx
