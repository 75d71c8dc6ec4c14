"""What the tests of this room share: small models."""

from tiny_models import tiny_model

__all__ = ["tiny_model"]
