"""Processes with limits for code that may hang or crash: symbolic mathematics and other packages' verifiers."""
