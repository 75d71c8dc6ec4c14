"""Prepares a large set of problems for RL and SFT: filters, removes duplicates, draws disjoint files. `nmoe data prepare CONFIG`"""
