"""Processes with limits that run what may hang or crash: symbolic mathematics and the verifiers of other packages."""
