"""Sizes of published models, as far as a kernel depends on them. Source: the models' own configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """A kind of attention layer. ``windows``: keys that a query sees, -1 for all of them, a layer one of these.
    ``latent``: the columns of the values of a latent cache, whose keys are the same memory; ``prompt``: columns of q,
    k and of v where prompts are attended without it."""

    heads: int
    kv_heads: int
    dim: int
    windows: tuple[int, ...] = (-1,)
    sink: bool = False
    softcap: float = 0.0
    latent: int = 0
    prompt: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Experts:
    """Routed experts of ``width`` features, behind a router. ``formats``: what their weights may be packed to.
    ``router``: softmax (of the chosen logits), softmax-first, sqrt-softplus or "", one that is not an op of ours."""

    count: int
    topk: int
    hidden: int
    width: int
    router: str
    formats: tuple[str, ...] = ("mxfp4", "nvfp4")
    swiglu: str = "silu"
    limit: float | None = None
    interleaved: bool = False
    bias: bool = False
    # Of the router: whether weights are normalised, and whether a layer chooses by a table of token ids.
    renormalize: bool = True
    table: bool = False
    # Whether processes also take shares of each expert's features: vLLM's do, of the experts that are ours there.
    sliced: bool = False


@dataclass(frozen=True)
class Sparse:
    """DeepSeek-V4's attention: a window and chosen entries, in rows that keys and values share."""

    heads: int
    hidden: int
    topk: int
    groups: int
    dim: int = 512
    rope: int = 64
    window: int = 128
    rank: int = 1024  # of the output projection
    index_heads: int = 64
    index_dim: int = 128


@dataclass(frozen=True)
class Norm:
    """A gated norm: so many rows of ``features`` a token."""

    features: int
    rows: int


@dataclass(frozen=True)
class Delta:
    """Gated DeltaNet: heads of q and k, those of v, and the channels of each."""

    key_heads: int
    value_heads: int
    dim: int = 128


@dataclass(frozen=True)
class Model:
    """What of a model runs on ops."""

    attention: Attention | None = None
    experts: Experts | None = None
    sparse: Sparse | None = None
    norm: Norm | None = None
    delta: Delta | None = None


def _gpt_oss(experts: int) -> Model:
    mlp = Experts(
        experts, 4, 2880, 2880, "softmax", ("mxfp4",), "gptoss", 7.0, interleaved=True, bias=True, sliced=True
    )
    return Model(Attention(64, 8, 64, (128, -1), sink=True), mlp)


def _qwen(heads: int, kv_heads: int, experts: Experts | None = None) -> Model:
    return Model(Attention(heads, kv_heads, 128), experts)


def _qwen35(heads: int, kv_heads: int, value_heads: int, experts: Experts | None = None) -> Model:
    delta = Delta(16, value_heads)
    return Model(Attention(heads, kv_heads, 256), experts, norm=Norm(delta.dim, value_heads), delta=delta)


def _deepseek_v4(heads: int, hidden: int, topk: int, groups: int, experts: int, width: int) -> Model:
    mlp = Experts(experts, 6, hidden, width, "sqrt-softplus", limit=10.0, table=True)
    return Model(experts=mlp, sparse=Sparse(heads, hidden, topk, groups))


def _routed(count: int, topk: int, hidden: int, width: int) -> Experts:
    return Experts(count, topk, hidden, width, "softmax-first")


MODELS: dict[str, Model] = {
    "gpt-oss-20b": _gpt_oss(32),
    "gpt-oss-120b": _gpt_oss(128),
    "llama-3-8b": Model(Attention(32, 8, 128)),
    "llama-3-70b": Model(Attention(64, 8, 128)),
    "qwen3-0.6b": _qwen(16, 8),
    "qwen3-1.7b": _qwen(16, 8),
    "qwen3-4b": _qwen(32, 8),
    "qwen3-8b": _qwen(32, 8),
    "qwen3-14b": _qwen(40, 8),
    "qwen3-32b": _qwen(64, 8),
    "qwen3-30b-a3b": _qwen(32, 4, _routed(128, 8, 2048, 768)),
    "qwen3-235b-a22b": _qwen(64, 4, _routed(128, 8, 4096, 1536)),
    "qwen3.5-9b": _qwen35(16, 4, 32),
    "qwen3.5-27b": _qwen35(24, 4, 48),
    "qwen3.5-35b-a3b": _qwen35(16, 2, 32, _routed(256, 8, 2048, 512)),
    "qwen3.5-122b-a10b": _qwen35(32, 2, 64, _routed(256, 8, 3072, 1024)),
    "qwen3.5-397b-a17b": _qwen35(32, 2, 64, _routed(512, 10, 4096, 1024)),
    "gemma-2-2b": Model(Attention(8, 4, 256, (4096, -1), softcap=50.0)),
    "gemma-2-9b": Model(Attention(16, 8, 256, (4096, -1), softcap=50.0)),
    "gemma-2-27b": Model(Attention(32, 16, 128, (4096, -1), softcap=50.0)),
    "gemma-3-1b": Model(Attention(4, 1, 256, (512, -1))),
    "gemma-3-4b": Model(Attention(8, 4, 256, (1024, -1))),
    "gemma-3-12b": Model(Attention(16, 8, 256, (1024, -1))),
    "gemma-3-27b": Model(Attention(32, 16, 128, (1024, -1))),
    "mistral-7b": Model(Attention(32, 8, 128, (4096, -1))),
    "mistral-small-24b": Model(Attention(32, 8, 128)),
    "deepseek-v3": Model(Attention(128, 1, 576, latent=512, prompt=(192, 128)), Experts(256, 8, 7168, 2048, "")),
    "deepseek-v4-flash": _deepseek_v4(64, 4096, 512, 8, 256, 2048),
    "deepseek-v4-pro": _deepseek_v4(128, 7168, 1024, 16, 384, 3072),
}


def named(names: list[str]) -> dict[str, Model]:
    """The models of ``names``, "all" for all of them. Raises ValueError for one that there is not."""
    for name in names:
        if name not in (*MODELS, "all"):
            raise ValueError(f"there is no model {name!r}, accepted: all, {', '.join(MODELS)}")
    return MODELS if "all" in names else {name: MODELS[name] for name in names}
