"""Linear layers and the operations that are fused with them: norms, activations, residuals and experts."""
