"""Files and stores: opened, locked and replaced with care; called again where a failure may pass."""
