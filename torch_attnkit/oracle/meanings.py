"""What arguments, outputs and axes of several ops are, for the ``meaning`` and ``axes`` fields of their tables.

A sentence says what a thing is, its unit, what None, -1 and 0 stand for, and what is accepted. What happens to indices
and lengths that are not is the same for all ops and is said where these sentences are shown.
"""

from __future__ import annotations

ATTENTION = {
    "sink": "A learned logit per query head, in the natural units of the scores that the softmax gets: it joins the"
    " denominator and has no value. None and -inf are no sink.",
    "kv_start": "First key of each sequence that counts (left padding), 0 to S; None is 0. At or past kv_len no key is"
    " left: out 0, lse -inf.",
    "block_table": "Pages of each sequence in order: key j lies in page block_table[b, j // Ps], slot j % Ps. Entries"
    " of pages of which no query sees a key may be anything, -1 for one.",
    "q_scale": "q stands for itself times this: a finite number above 0 for each sequence and KV head, which its query"
    " heads share, or one for all; None is 1.",
    "k_scale": "Keys stand for themselves times this: a finite number above 0 for each sequence and KV head, or one for"
    " all; None is 1.",
    "v_scale": "Values stand for themselves times this: a finite number above 0 for each sequence and KV head, or one"
    " for all; None is 1.",
    "scale": "Factor of the product of a query and a key, which makes it a score; None is 1 / sqrt(D).",
    "causal": "True: a query sees no key past its own position.",
    "window": "A query at position p sees keys above p - window, and without causal only those below p + window. -1 is"
    " off; 0 leaves only the sink_tokens.",
    "sink_tokens": "The window hides none of the first so many keys that count; 0 is none, and without a window it"
    " changes nothing.",
    "softcap": "Scores become softcap * tanh(score / softcap), after scale and before the softmax; 0 is off.",
    "normalize": "False returns the numerator as out and the denominator as row_sum, for merge_partials; a sink is"
    " refused then.",
    "out": "Attention output: values weighted by the softmax, accumulated in float32 and rounded once; 0 where a query"
    " sees no key.",
    "lse": "Natural logarithm of the sum of exp(score) over the keys that a query sees, sink left out; -inf where it"
    " sees none.",
    "row_sum": "Sum of exp(score - largest score) over the keys that a query sees, 0 where it sees none; empty with"
    " normalize=True.",
    "cu_seqlens_q": "Offsets of the sequences in q, from 0 and never falling: b has the tokens from cu_seqlens_q[b] up"
    " to the next offset. Tokens past the last one have out 0, lse -inf.",
    "max_seqlen_q": "Most query tokens of a sequence, a hint for the launch; -1 is unknown. Below the longest sequence"
    " it raises on a CPU, and the result on a GPU is undefined.",
    "max_seqlen_k": "Most keys of a sequence, a hint for the launch; -1 is unknown. Below the longest sequence it"
    " raises on a CPU, and the result on a GPU is undefined.",
}
# Of decode, whose one query stands behind all keys.
LAST_KEYS = "The query sees so many keys, the last ones, itself included; -1 is off, 0 leaves only the sink_tokens."
NUMERATOR = (
    "Attention output, 0 where a query sees no key; with normalize=False the numerator of the softmax, the sum of"
    " exp(score - largest score) times the value."
)
FP4 = {
    "codes": "E2M1 numbers along the last axis, two a byte: element 2i in the low four bits of byte i.",
    "scale_layout": "Order of the scales: 'linear' has a row for each row of codes, '128x4' all rows as one matrix in"
    " the tiles that block-scaled tensor cores read.",
    "dtype": "Dtype of x, a floating point type; None is float32.",
}
# Of rows of a cache, which may be encoded.
CACHE = {
    "slot": "Row of the cache for each row of kv, -1 to Nc - 1; -1 skips the row, and no other slot may stand twice.",
    "cache": "Rows that are written in place: numbers in the dtype of kv with format 'none', bytes with the others."
    " Rows that no slot names stay as they are.",
    "format": "How a row is stored: 'none' as numbers; 'fp8' as E4M3 under a scale per 64, 'nvfp4' as E2M1 per 16,"
    " 'mxfp4' as E2M1 per 32, each with RoPE channels in bfloat16.",
    "rope_dim": "Channels at the end of a row that are RoPE and stay bfloat16 when the others are encoded, 0 to D;"
    " format 'none' does not look at it.",
    "global_scale": "Factor of the numbers before they are encoded, as in nvfp4_quantize, for format 'nvfp4' only; None"
    " is 1.",
}
# Of tokens of requests that look at entries of a cache.
REQUESTS = {
    "request_ids": "Request of each token, 0 to R - 1; None: the tokens stand in R equal blocks, one for each request"
    " in order.",
    "topk": "Entries to choose for each token, at least 1; where fewer count, -1 fills the rest.",
    "indices": "The chosen entries of each token in ascending order, -1 behind them. Ties go to the lowest index; a"
    " score of NaN or -inf is never chosen.",
}
ROUTES = {
    "logits": "Router logit of each expert for each token; -inf gives weight 0. NaN and +inf raise on a CPU.",
    "topk": "Experts of each token, 1 to E.",
    "route_scale": "Factor of the weights, applied last.",
    "renormalize": "Whether the weights of a token are divided by their sum + 1e-20 before route_scale, so that they"
    " add up to 1.",
    "indices": "Chosen experts of each token, the largest score first; ties go to the lowest index.",
}
# Of norms and rotations.
HEADS = {
    "eps": "Added to the mean square before the root is taken; above 0.",
    "cos": "Cosine of the angle of each token's rotated pairs: the last 2 * R2 channels, interleaved.",
    "sin": "Sine of the angle of each token's rotated pairs, as cos has them.",
}
AXES = {
    "B": "sequences of the batch",
    "T": "query tokens of a sequence (as a dtype, T is the model's)",
    "S": "keys that a sequence has room for",
    "Tq": "query tokens of all sequences together",
    "Hq": "query heads",
    "Hkv": "KV heads; Hq / Hkv neighbouring query heads share one",
    "D": "channels of a query's and a key's head",
    "Dv": "channels of a value's head",
    "Np": "pages of a cache",
    "Ps": "keys that a page has room for",
    "Mp": "pages that a sequence has room for in block_table",
    "bits": "bits of an element of the caches; 8 is E4M3",
    "R": "rows, one for each token",
    "E": "experts",
    "K": "what is chosen for a token, topk of them",
    "N": "channels of a row",
    "Nc": "rows of the cache",
    "Rb": "elements of a row of the cache: D numbers, or the bytes of an encoded one",
    "R2": "rotated pairs of channels",
    "fmt": "format by its place in none, fp8, nvfp4, mxfp4",
    "blk": "numbers under one scale: 16 of nvfp4, 32 of mxfp4",
    "Ms": "rows of scales in the 128x4 layout, rounded up to 128",
    "Ks": "scales of a row in the 128x4 layout, rounded up to 4",
    "Ds": "scales of a head",
    "Gs": "groups of heads, a matrix of scales each",
    "PTq": "Tq rounded up to 128",
    "PDs": "scales of a group's heads, rounded up to 4",
}


def take(shared: dict[str, str], names: str, **own: str) -> dict[str, str]:
    """The shared sentences of ``names``, and an op's own."""
    return {name: shared[name] for name in names.split()} | own


def axes(names: str, **own: str) -> dict[str, str]:
    """The same of axes."""
    return take(AXES, names, **own)
