"""The ops of specgraph: one file per kernel, the plain-PyTorch definition beside its registration.

Importing a file registers its ops under ``torch.ops.specgraph``. This package itself imports nothing: with the
repository's root on the path, transformers finds it while looking for an optional package of the name ``kernels`` and
imports it in the middle of its own start.
"""
