// A depthwise convolution over packed sequences, ahead of the gated delta rule: out[t, c] = act(bias[c] + sum over i of
// weight[c, i] x[t - TAPS + 1 + i, c]), in float. x and out (tokens, channels), weight (channels, TAPS), bias (channels)
// and state (slots, channels, COLUMNS) of TYPE; offsets (sequences + 1), index and past (sequences) int. Tokens before a
// sequence's first are the last ones of its slot's state, or zeros where past is 0; the state is left with the last
// COLUMNS tokens, newest last. Without a slot, and behind the last sequence, out is 0.
//
// A thread has a channel: runs of RUN tokens of a sequence, every so many. The one that has a sequence's first run reads
// the state and leaves the new one: nobody else reads or writes it.
//
// Grid: x threadgroups of channels, y sequences and one for the tokens behind them, z runs.
//
// Defined by the host: TYPE, TAPS, COLUMNS, RUN, SILU, BIAS.

#include <metal_stdlib>
using namespace metal;

struct Shape {
  long tokens;
  long channels;
  long sequences;
  long slots;
  long has_past;
  long x[2];  // elements from token to token, channel to channel; and so on
  long weight[2];
  long state[3];
  long offsets[1];
  long index[1];
  long past[1];
  long bias[1];
};

[[kernel]] void causal_conv1d(
    const device TYPE* x [[buffer(0)]],
    const device TYPE* weight [[buffer(1)]],
    device TYPE* state [[buffer(2)]],
    const device int* offsets [[buffer(3)]],
    const device int* index [[buffer(4)]],
    const device TYPE* bias [[buffer(5)]],
    const device int* past [[buffer(6)]],
    device TYPE* out [[buffer(7)]],
    constant Shape& shape [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_index [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const int channel = int(group.x * threads.x + thread_index.x), sequence = int(group.y);
  const int limit = int(shape.tokens), channels = int(shape.channels), runs = int(groups.z), part = int(group.z);
  if (channel >= channels) {
    return;
  }
  const bool given = sequence < int(shape.sequences);
  const int first = clamp(offsets[sequence * shape.offsets[0]], 0, limit);
  const int last = given ? clamp(offsets[(sequence + 1) * shape.offsets[0]], first, limit) : limit;
  const int slot = given ? index[sequence * shape.index[0]] : -1, tokens = last - first;
  if (slot < 0 || slot >= int(shape.slots)) {
    for (int t = first + part; t < last; t += runs) {
      out[long(t) * channels + channel] = TYPE(0.0f);
    }
    return;
  }
  const bool begun = shape.has_past == 0 || past[sequence * shape.past[0]] != 0;
  const device TYPE* const from = x + first * shape.x[0] + channel * shape.x[1];
  device TYPE* const held = state + slot * shape.state[0] + channel * shape.state[1];
  float taps[TAPS];
  for (int i = 0; i < TAPS; i++) {
    taps[i] = float(weight[channel * shape.weight[0] + i * shape.weight[1]]);
  }
  float shift = 0.0f;
#if BIAS
  shift = float(bias[channel * shape.bias[0]]);
#endif
  for (int begin = part * RUN; begin < tokens; begin += runs * RUN) {
    float window[TAPS];
    if (begin > 0) {
      for (int i = 0; i < TAPS - 1; i++) {
        window[i] = float(from[(begin + i - (TAPS - 1)) * shape.x[0]]);
      }
    } else {
      float old[COLUMNS];
      for (int i = 0; i < COLUMNS; i++) {
        old[i] = begun ? float(held[i * shape.state[2]]) : 0.0f;
      }
      for (int i = 0; i < TAPS - 1; i++) {
        window[i] = old[COLUMNS - (TAPS - 1) + i];
      }
      for (int i = 0; i < COLUMNS; i++) {
        const int token = tokens - COLUMNS + i;
        held[i * shape.state[2]] = token >= 0 ? from[token * shape.x[0]] : TYPE(old[COLUMNS + token]);
      }
    }
    const int end = min(begin + RUN, tokens);
    for (int t = begin; t < end; t++) {
      window[TAPS - 1] = float(from[t * shape.x[0]]);
      float total = shift;
      for (int i = 0; i < TAPS; i++) {
        total = fma(taps[i], window[i], total);
      }
#if SILU
      total = total / (1.0f + exp(-total));
#endif
      out[long(first + t) * channels + channel] = TYPE(total);
      for (int i = 0; i < TAPS - 1; i++) {
        window[i] = window[i + 1];
      }
    }
  }
}
