"""The ops of specgraph. Each kernel has a file, and the op's plain-PyTorch definition stands beside its registration.

Importing a file registers its ops under ``torch.ops.specgraph``. This package itself must import nothing. When the
repository's root is on the path, transformers finds this package while it looks for an optional package named
``kernels``, and imports it in the middle of its own import.
"""
