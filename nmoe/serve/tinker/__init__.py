"""Tinker's protocol over one checkpoint: clients train adapters of it and sample from them (`nmoe serve --tinker`)."""
