"""How a run is laid over the mesh: the strategies that core brings, and the pieces that others build on."""
