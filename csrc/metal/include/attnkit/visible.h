// Which keys a query sees, and the scores of what it sees.

// The query sees key j if j < cap and either low <= j < high or j < sinks. low >= first, the first valid key.
struct Visible {
  int low;
  int high;
  int cap;
  int sinks;

  bool sees(int key) const {
    return key < cap && ((key >= low && key < high) || key < sinks);
  }
};

// What a launch says about visibility; window -1 is off.
struct Masks {
  bool causal;
  int window;
  int sink_tokens;
};

// Of the query at ``position``, among the keys [first, end). Sums stay in 32 bits: the host keeps window and
// sink_tokens below 2^30.
inline Visible visible(int position, int first, int end, thread const Masks& masks) {
  Visible v;
  v.cap = masks.causal ? min(end, position + 1) : end;
  v.low = first;
  v.high = v.cap;
  v.sinks = first;
  if (masks.window >= 0) {
    // A window of 0 holds no key, also where the walk of several queries would join theirs.
    v.low = masks.window == 0 ? max(first, end) : max(first, position - masks.window + 1);
    v.high = masks.causal ? v.cap : min(end, position + masks.window);
    v.sinks = first + masks.sink_tokens;
  }
  return v;
}

// The keys that any of several queries sees: two ranges, counted as one. Key number i of the walk is the i-th sink
// token, then follows the window, so no masked key between them costs a step.
struct Walk {
  int first;
  int sinks;  // keys of the first range
  int low;  // first key of the second range
  int count;

  int key(int i) const {
    return i < sinks ? first + i : low + (i - sinks);
  }
};

// ``a`` belongs to the query with the lowest position, ``b`` to the one with the highest.
inline Walk walk(int first, thread const Visible& a, thread const Visible& b) {
  Walk w;
  w.first = first;
  w.low = a.low;
  w.sinks = max(0, min(min(b.sinks, b.cap), a.low) - first);
  w.count = w.sinks + max(0, min(max(b.high, b.sinks), b.cap) - a.low);
  return w;
}

// Two products of q and k to scores: scaled here, in float, never in the model dtype. ``cap`` 0 is no cap; with one,
// ``scale`` has been divided by it.
inline float2 scores(float2 dot, float scale, float cap) {
  const float2 x = dot * scale;
  return cap > 0.0f ? cap * tanh(x) : x;
}

// What is subtracted of scores whose row_max is ``x``. That is -inf where nothing has been seen yet, or nan alone,
// which maxima pass over; -inf - -inf would make nan of nothing, and a weight of 0 taken instead would lose the nan.
inline float safe_max(float x) {
  return x == -INFINITY ? 0.0f : x;
}

inline float2 safe_max(float2 x) {
  return float2(safe_max(x.x), safe_max(x.y));
}
