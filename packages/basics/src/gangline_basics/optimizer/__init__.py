"""AdamW, also with moments in 8 bits, Lion, Muon, SOAP."""
