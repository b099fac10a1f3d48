// The arithmetic of routers: an exponential, sqrt(softplus(x)), and numbers as integers of the same order.
//
// Nothing here depends on how a library rounds: a sum or product at a time, fused where it says so, and no subnormal
// number on the way. So what experts are chosen by is the same on every machine.

constant constexpr int NONE = -2147483647 - 1;  // below the key of every number: no expert, or one that has been chosen
constant constexpr int NO_EXPERT = 2147483647;
constant constexpr float TINY = 1e-20f;  // added to a sum that weights are divided by: nothing but zeros stay zeros
constant constexpr float LOWEST = -87.0f;  // e^x is normal down to it
constant constexpr float FAR = -17.0f;  // below it sqrt(log(1 + e^x)) is e^(x/2), but for 1e-8 of it
constant constexpr float NOTHING = -104.0f;  // below it e^x is 0 in float32, and so is the score

// e^x to about a rounding for x that is not positive, 0 below LOWEST: 2^n e^r, |r| up to half of log 2, by the series
// of e^r to r^7, of which the rest is below 2^-27.
inline float exponential(float x) {
  constexpr float LN_2 = 0.693147182464599609375f, LN_2_REST = -1.904654299957767e-09f;
  const float a = max(x, LOWEST), n = rint(a * M_LOG2E_F);
  const float r = fma(n, -LN_2_REST, fma(n, -LN_2, a));
  float p = fma(r, 1.0f / 5040.0f, 1.0f / 720.0f);
  p = fma(r, p, 1.0f / 120.0f);
  p = fma(r, p, 1.0f / 24.0f);
  p = fma(r, p, 1.0f / 6.0f);
  p = fma(r, p, 0.5f);
  p = fma(r, p, 1.0f);
  p = fma(r, p, 1.0f);
  return x < LOWEST ? 0.0f : p * power_of_two(int(n));
}

// log(1 + e) / e on [0, 1]: the best polynomial of degree 8 that begins with 1, within 3.3e-8.
inline float log1p_ratio(float e) {
  float p = fma(e, 0.005364738870412111f, -0.030065450817346573f);
  p = fma(e, p, 0.07920398563146591f);
  p = fma(e, p, -0.13753755390644073f);
  p = fma(e, p, 0.1915363371372223f);
  p = fma(e, p, -0.24857157468795776f);
  p = fma(e, p, 0.333213210105896f);
  p = fma(e, p, -0.49999648332595825f);
  return fma(e, p, 1.0f);
}

// sqrt(log(1 + e^x)), as log(1 + e^-|x|) + max(x, 0), of which the sum rounds once.
inline float sqrt_softplus(float x) {
  const float e = exponential(x < FAR ? 0.5f * x : -abs(x));
  const float root = sqrt(fma(e, log1p_ratio(e), max(x, 0.0f)));
  return x < NOTHING ? 0.0f : x < FAR ? e : root;
}

// An integer that compares as the number does: above NONE, and the same for 0 and -0.
inline int ordered(uint bits) {
  const int key = int(bits == ~MAGNITUDE ? 0u : bits);
  return max(key ^ ((key >> 31) & int(MAGNITUDE)), NONE + 1);
}
