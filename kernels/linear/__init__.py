"""Linear layers with what surrounds them: norms, activations, residuals, experts."""
