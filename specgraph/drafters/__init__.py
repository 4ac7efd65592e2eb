"""The drafters: one file each, with its configuration, its checkpoints, its modules and its part of the step graph.

This package imports none of them, so that the command line's help, which lists their keys, does not wait for torch.
:mod:`specgraph.drafters.registry` finds them.
"""
