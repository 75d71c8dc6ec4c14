"""Rewards besides the rubric's components: user functions, services and models, named in `[[rewards]]` of an environment."""
