"""The gated delta rule by chunks, by ``mma.sync``: all of NVIDIA's targets."""
