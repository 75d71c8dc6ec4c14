"""Prepare many problems for RL and SFT: filter, remove duplicates, draw disjoint files. `nmoe data prepare CONFIG`"""
