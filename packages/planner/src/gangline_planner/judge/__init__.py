"""Published measurements beside what is predicted for them."""
