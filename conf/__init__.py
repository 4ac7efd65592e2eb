"""Hydra configurations: the YAML files beside this one; their keys are defined in `specgraph.config`."""
