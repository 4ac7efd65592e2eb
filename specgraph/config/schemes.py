"""The names of schemes, apart from what they do, so that the command line can check one without importing torch."""

SCHEMES = (
    "int4", "mxfp4", "fp8", "int4_zeros", "nvfp4", "fp8_channel", "fp8_token", "int8_channel", "int8_token",
)  # fmt: skip
"""The schemes in which :func:`specgraph.quantise` can store weights, and ``bench weights=`` draws them."""
