"""Published step times next to the planner's predictions."""
