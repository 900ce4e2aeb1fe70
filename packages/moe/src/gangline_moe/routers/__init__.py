"""Which experts each token goes through, and with what weight. Each module names the method's source."""
