"""Rewards beside the rubric's components: functions of the user's own and services, named in `[[rewards]]` of an environment."""
