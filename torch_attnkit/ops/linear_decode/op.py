"""linear_decode: a product of few tokens with a weight, ``x @ weight.T + bias``, in one launch.

Products and sums in float32, the bias added to them, one rounding at the store. K is cut inside of a CTA, so that no
second launch adds parts up, as libraries do for few tokens.
Source: torch.nn.functional.linear.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.kernels import batched_gemm
from torch_attnkit.kernels.batched_gemm import MOST_FEW
from torch_attnkit.oracle import meanings

OP = Op(
    schema="linear_decode(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor out",
    dims={"x": "Tq K", "weight": "N K", "bias": "N", "out": "Tq N"},
    meaning=dict(
        x="Rows of tokens.",
        weight="A row for each number of a token's result.",
        bias="Added to every token's result; None adds nothing.",
        out="Product of each token's row with every row of the weight, accumulated in float32 and rounded once.",
    ),
    axes=meanings.axes("", Tq="tokens", N="rows of the weight", K="numbers of a row"),
    features={"bias": lambda c: c.arg.bias is not None},
    shards=(Shards("Tq"), Shards("N")),
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16",
            features="bias",
            needs={
                f"at most {MOST_FEW} tokens": lambda c: c.dim["Tq"] <= MOST_FEW,
                "K must be a multiple of 32": lambda c: c.dim["K"] % 32 == 0,
                "rows of x and weight must start at multiples of 16 bytes": lambda c: all(
                    t.shape[0] < 2 or t.stride(0) % 8 == 0 for t in (c.arg.x, c.arg.weight)
                ),
                "fewer than 2^31 rows and numbers of a row": lambda c: max(c.dim["N"], c.dim["K"]) < 2**31,
            },
            launcher=batched_gemm.NVIDIA_FEW,
        ),
    ),
)
