"""Typed settings: reads TOML files and overrides, and returns frozen, checked sections or one error with every problem."""

from nmoe.config.base import Array, Conflict, DataPath, FromFile, Section
from nmoe.config.loader import load, parse
from nmoe.config.locate import Locator, Place
from nmoe.config.problems import ConfigError
from nmoe.config.toml import to_toml

__all__ = [
    "Array",
    "ConfigError",
    "Conflict",
    "DataPath",
    "FromFile",
    "Locator",
    "Place",
    "Section",
    "load",
    "parse",
    "to_toml",
]
