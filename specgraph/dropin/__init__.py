"""A compiled decoder behind the interface of transformers: what calls ``model.generate`` runs unchanged."""
