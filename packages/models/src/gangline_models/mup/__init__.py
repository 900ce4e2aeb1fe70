"""Model edit `mup`: maximal update parametrisation (muP), which transfers tuned learning rates to wider models."""
