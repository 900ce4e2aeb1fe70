"""How weights follow gradients: what an optimizer imports."""
