"""The drafters: one file each, with its checkpoints, its modules and its part of the step graph.

This package imports none of them; :mod:`specgraph.drafters.registry` finds them. Their configuration classes stand in
:mod:`specgraph.config.drafters`.
"""
