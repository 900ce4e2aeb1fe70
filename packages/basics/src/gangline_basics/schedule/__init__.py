"""How the learning rate goes over the run: pure functions of the step."""
