"""Layers with a recurrent state: each as an op without memory, which stands in a traced model, and one with its state.

The state of a sequence stays at the last absolute chunk boundary, and the rows since then are cached like keys and
values (:mod:`specgraph.kernels.recurrent.span`). So a rejected draft is a shorter length: nothing is rolled back, and
the state is written once per chunk, whatever was drafted.
"""

from __future__ import annotations
