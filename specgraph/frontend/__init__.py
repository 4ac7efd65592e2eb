"""From a model of transformers to the first program."""
